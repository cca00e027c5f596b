"""Anchors are before another token, differ between epochs, and are a function of seed and step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_mcmc.rng import Key
from dflash_mcmc.train.blocks import Epochs, draw_anchors, gather, possible_anchors
from dflash_mcmc.train.responses import Response
from tests.train.drafts import random_responses


def test_an_anchor_is_before_another_token_of_the_response():
    response = Response(np.arange(10, dtype=np.int32), prompt_length=4)
    assert list(possible_anchors(response, prompt_end=False)) == [4, 5, 6, 7, 8]
    assert list(possible_anchors(response, prompt_end=True)) == [3, 4, 5, 6, 7, 8]
    assert not possible_anchors(Response(np.arange(5, dtype=np.int32), 4), prompt_end=False)


@pytest.mark.parametrize("prompt_end", [False, True])
def test_anchors_are_different_and_uniform(prompt_end):
    response = Response(np.arange(10, dtype=np.int32), prompt_length=4)
    drawn = [draw_anchors(response, 2, prompt_end, Key(n)) for n in range(600)]
    possible = possible_anchors(response, prompt_end)
    assert all(len(set(anchors)) == 2 and set(anchors) <= set(possible) for anchors in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=10)[list(possible)]
    assert counts.min() > 0.8 * counts.mean()
    assert list(draw_anchors(response, 99, prompt_end, Key(0))) == list(possible)


def test_padding_is_on_the_right_and_has_no_anchors():
    blocks = gather(random_responses((6, 9)), [np.array([4]), np.array([4, 7])])
    assert blocks.tokens.shape == (2, 9)
    assert blocks.anchors.tolist() == [[4, -1], [4, 7]]
    assert blocks.lengths.tolist() == [6, 9]
    one = blocks.rows([0])
    assert one.tokens.shape == (1, 6)
    assert torch.equal(one.tokens[0], blocks.tokens[0, :6])


def batches_of(epochs: Epochs, steps: range) -> list[tuple]:
    return [tuple(map(lambda part: part.tolist(), epochs(step))) for step in steps]


def test_a_batch_is_a_function_of_seed_and_step():
    responses = random_responses(tuple(range(8, 28)))
    first = batches_of(Epochs(responses, 2, 3, False, seed=0), range(25))
    again = Epochs(responses, 2, 3, False, seed=0)
    assert batches_of(again, range(24, -1, -1)) == first[::-1]
    assert batches_of(Epochs(responses, 2, 3, False, seed=1), range(25)) != first


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
