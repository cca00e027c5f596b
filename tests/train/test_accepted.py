"""The accepted length, computed from all anchors at once, equals that of a loop that drafts one block after another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_mcmc.train.blocks import accepted_lengths, by_position, count, walk
from dflash_mcmc.train.responses import Response
from tests.train.drafts import BLOCK_SIZE, block_alone, random_draft, random_target

PROMPT = (7, 3, 50)


@pytest.fixture(scope="module")
def pair():
    target = random_target()
    return random_draft(target).eval(), target


@torch.no_grad()
def agreeing(pair, agreements: tuple[int, ...]) -> Response:
    """A sequence whose blocks, starting at the end of the prompt, accept the given numbers of tokens."""
    tokens = list(PROMPT)
    for agreed in agreements:
        proposed = block_alone(*pair, torch.tensor(tokens), len(tokens) - 1).argmax(dim=-1).tolist()
        tokens += proposed[:agreed]
        tokens.append((proposed[agreed] + 1) % 58 if agreed < BLOCK_SIZE - 1 else 9)
    return Response(np.array(tokens, np.int32), len(PROMPT))


@torch.no_grad()
def speculate(pair, response: Response) -> int:
    """Number of forwards of the target when blocks are drafted one at a time."""
    tokens, anchor, forwards = torch.from_numpy(response.tokens).long(), response.prompt_length - 1, 0
    while anchor < response.length - 1:
        for proposed in block_alone(*pair, tokens[: anchor + 1], anchor).argmax(dim=-1).tolist():
            if anchor + 1 == response.length or proposed != tokens[anchor + 1]:
                break
            anchor += 1
        anchor += 1
        forwards += 1
    return forwards


AGREEMENTS = ((2, 0, 4, 1), (0, 0), (4, 4, 3), (1,))


def test_count_equals_a_loop_over_blocks(pair):
    responses = [agreeing(pair, agreements) for agreements in AGREEMENTS]
    forwards = sum(speculate(pair, response) for response in responses)
    assert forwards == sum(map(len, AGREEMENTS))
    tokens = sum(response.length - response.prompt_length for response in responses)
    for rows_at_once, anchors_at_once in ((4, 99), (3, 2), (1, 1)):
        assert count(*pair, responses, rows_at_once, anchors_at_once) == (tokens, forwards)


def test_accepted_length_at_every_anchor(pair):
    responses = [agreeing(pair, agreements) for agreements in AGREEMENTS]
    found = accepted_lengths(*pair, responses, 3)
    for response, row in zip(responses, found, strict=True):
        for anchor in range(found.shape[1]):
            expected = 0
            if response.prompt_length - 1 <= anchor < response.length - 1:
                tokens = torch.from_numpy(response.tokens).long()
                proposed = block_alone(*pair, tokens, anchor).argmax(dim=-1)
                following = tokens[anchor + 1 : anchor + BLOCK_SIZE]
                expected = int((proposed[: len(following)] == following).long().cumprod(0).sum())
            assert row[anchor] == expected


def test_a_sequence_that_ends_within_a_block_takes_one_forward(pair):
    whole = agreeing(pair, (4,))
    cut = Response(whole.tokens[:-2], whole.prompt_length)
    assert speculate(pair, cut) == 1
    assert count(*pair, [cut], 8, 8) == (3, 1)


def test_walk_goes_from_block_to_block():
    accepted = np.array([9, 9, 1, 9, 0, 2, 9, 9, 9])
    assert walk(accepted, 2, 9) == [2, 4, 5]
    assert walk(accepted, 8, 9) == []
    assert walk(np.zeros(9, int), 2, 9) == [2, 3, 4, 5, 6, 7]


def test_a_forward_belongs_to_the_part_of_its_first_token(pair):
    responses = [agreeing(pair, agreements) for agreements in ((2, 0, 4, 1), (0, 0))]  # first tokens 0 3 4 9, and 0 1
    found = by_position(*pair, responses, 2, 8, 4, 2)
    assert found.tolist() == [[3 + 1 + 1 + 1, 4], [5 + 2, 2]]
    assert by_position(*pair, responses, 2, 8, 4, 4).tolist() == [[6, 4], [5, 1], [2, 1], [0, 0]]
    assert found.sum(axis=0).tolist() == list(count(*pair, responses, 2, 8))
