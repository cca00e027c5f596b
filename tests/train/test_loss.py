"""The loss: all blocks in one pass equal the definition, computed for single blocks and slots."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from dflash_mcmc.rng import Key
from dflash_mcmc.train import loss as losses
from dflash_mcmc.train.draft import cosine
from dflash_mcmc.train.loss import (
    Epochs,
    Objective,
    Response,
    TrainingBlocks,
    accepted_lengths,
    draw_anchors,
    gather,
    loss_sum,
    possible_anchors,
    speculated,
)
from tests.train.drafts import BLOCK_SIZE, block_alone, random_draft, random_responses, random_target

GAMMA = 2.0
ANCHORS = ([4, 6, 11], [3], [5, 20, 24, 25])


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.fixture
def draft(target):
    return random_draft(target)


def some_blocks() -> TrainingBlocks:
    return gather(random_responses((13, 5, 27)), [np.array(anchors) for anchors in ANCHORS])


def one_by_one(draft, target, blocks: TrainingBlocks, objective: Objective) -> torch.Tensor:
    """The loss, computed for each block and slot separately."""
    total = torch.zeros(())
    for row, anchors in enumerate(ANCHORS):
        tokens = blocks.tokens[row, : blocks.lengths[row]]
        targets = target.logits(target.decoder(input_ids=tokens[None], use_cache=False).last_hidden_state[0]).detach()
        for anchor in anchors:
            logits = block_alone(draft, target, tokens, anchor)
            for slot in range(1, BLOCK_SIZE):
                if anchor + slot == len(tokens):
                    break
                weight = math.exp(-(slot - 1) / objective.gamma)
                if objective.target == "tokens":
                    value = cross_entropy(logits[slot - 1], tokens[anchor + slot])
                else:
                    power = objective.alpha if objective.target == "p_alpha" else 1.0
                    p = torch.softmax(power * targets[anchor + slot - 1, :58], dim=-1)
                    value = (p * (p.log() - torch.log_softmax(logits[slot - 1, :58], dim=-1))).sum()
                total = total + weight * value
    return total


@pytest.mark.parametrize("name", ["tokens", "p", "p_alpha"])
def test_one_pass_equals_the_blocks_one_by_one(target, draft, name):
    blocks, objective = some_blocks(), Objective(name, 3.0, GAMMA)
    ours, theirs = loss_sum(draft, target, blocks, objective, autocast=False), one_by_one(draft, target, blocks, objective)
    assert ours.item() == pytest.approx(theirs.item(), rel=2e-5)
    gradients = [torch.autograd.grad(value, list(draft.parameters())) for value in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        assert torch.allclose(mine, other, atol=1e-4 * other.abs().max())


def test_parts_add_up_to_the_whole(target, draft, monkeypatch):
    blocks, objective = some_blocks(), Objective("p", 1.0, GAMMA)
    whole = loss_sum(draft, target, blocks, objective, autocast=False)
    parts = sum(loss_sum(draft, target, blocks.rows([row]), objective, autocast=False) for row in range(3))
    monkeypatch.setattr(losses, "_SLOTS_AT_ONCE", 4)
    pieces = loss_sum(draft, target, blocks, objective, autocast=False)
    for value in (parts, pieces):
        assert value.item() == pytest.approx(whole.item(), rel=1e-5)
    for mine, other in zip(*(torch.autograd.grad(value, list(draft.parameters())) for value in (pieces, whole)), strict=True):
        assert torch.allclose(mine, other, atol=1e-4 * other.abs().max())


def test_target_is_not_trained(target, draft):
    loss_sum(draft, target, some_blocks(), Objective("p", 1.0, GAMMA), autocast=True).backward()
    assert all(parameter.grad is None for module in (target.decoder, target.head) for parameter in module.parameters())
    assert all(torch.isfinite(parameter.grad).all() for parameter in draft.parameters())


# Anchors are before another token, differ between epochs, and are a function of seed and step.


@pytest.mark.parametrize(("prompt_end", "possible"), [(False, [4, 5, 6, 7, 8]), (True, [3, 4, 5, 6, 7, 8])])
def test_anchors_are_before_another_token_different_and_uniform(prompt_end, possible):
    response = Response(np.arange(10, dtype=np.int32), prompt_length=4)
    drawn = [draw_anchors(response, 2, prompt_end, Key(n)) for n in range(600)]
    assert all(len(set(anchors)) == 2 and set(anchors) <= set(possible) for anchors in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=10)[possible]
    assert counts.min() > 0.8 * counts.mean()
    assert list(draw_anchors(response, 99, prompt_end, Key(0))) == list(possible_anchors(response, prompt_end)) == possible
    assert not possible_anchors(Response(np.arange(5, dtype=np.int32), 4), prompt_end=False)


def test_a_batch_is_a_function_of_seed_and_step():
    responses = random_responses(tuple(range(8, 28)))
    first, again, other = (Epochs(responses, 2, 3, False, seed=seed) for seed in (0, 0, 1))
    batches = [[part.tolist() for part in first(step)] for step in range(25)]
    assert [[part.tolist() for part in again(step)] for step in reversed(range(25))] == batches[::-1]
    assert [[part.tolist() for part in other(step)] for step in range(25)] != batches


def test_an_epoch_has_every_sequence_once_and_its_own_anchors():
    responses = random_responses(tuple(range(8, 28)))
    epochs = Epochs([*responses, *random_responses((5,))], 2, 3, False, seed=0)  # the last one has no possible anchor
    assert epochs.num_batches == 10
    of_epoch = []
    for start in (0, 10):
        batches = [epochs(step) for step in range(start, start + 10)]
        rows = [(length, anchors) for batch in batches
                for length, anchors in zip(batch.lengths.tolist(), batch.anchors.tolist(), strict=True)]
        assert sorted(length for length, _ in rows) == list(range(8, 28))
        of_epoch.append(dict(rows))
    assert sum(of_epoch[0][length] != of_epoch[1][length] for length in of_epoch[0]) > 10


def test_an_epoch_leaves_out_any_responses_that_fill_no_batch():
    """Also the longest ones are trained on: they are sorted by length after those have been left out."""
    epochs = Epochs(random_responses(tuple(range(8, 23))), 8, 2, False, seed=5)
    every = [epochs.indices(step) for step in range(30)]
    assert {len(batch) for batch in every} == {8}
    assert set().union(*every) == set(range(15))


# The accepted length, computed from all anchors at once, equals that of a loop that drafts one block after another.

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


AGREEMENTS = ((2, 0, 4, 1), (0, 0), (4, 4, 3), (1,))


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


def test_the_accepted_length_counts_blocks_from_the_end_of_the_prompt(pair):
    responses = [agreeing(pair, agreements) for agreements in AGREEMENTS]
    tokens = sum(response.length - response.prompt_length for response in responses)
    for rows_at_once, anchors_at_once in ((4, 99), (3, 2), (1, 1)):
        assert speculated(*pair, responses, rows_at_once, anchors_at_once) == (tokens, sum(map(len, AGREEMENTS)))


# The cosine schedule. `test_embedded.py` tests the other schedule.

def test_cosine_rises_and_falls_to_zero():
    rates = [cosine(step, 100, 2.0, 0.04) for step in range(101)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[52] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0)
    assert sorted(rates[4:], reverse=True) == rates[4:]
    assert cosine(0, 100, 2.0, 0.0) == 2.0
