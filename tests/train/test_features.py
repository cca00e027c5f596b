"""What is kept is that of a reading, each response is read once, and losses with and without them agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_mcmc.forcing import sequences
from dflash_mcmc.train.blocks import Epochs, KeptReader, TargetReader, gather
from dflash_mcmc.train.loss import Objective, loss_sum
from tests.train.drafts import random_draft, random_responses, random_target


@pytest.mark.parametrize("name", ["tokens", "p_alpha"])
def test_losses_with_kept_features_are_those_of_a_reading(monkeypatch, name):
    target, answers, reads = random_target(), random_responses((13, 9, 27)), []
    draft, objective = random_draft(target), Objective(name, 3.0, 2.0)
    kept, read = KeptReader(TargetReader(target, draft.shape.target_layers, objective.power)), sequences.read

    def counted(model, tokens, layers):
        reads.append(tokens.shape)
        return read(model, tokens, layers)

    first = None
    for numbers in ([0, 1], [2, 0], [1, 2, 0], [0, 1]):
        blocks = gather([answers[n] for n in numbers], [np.array([4, 6]) for _ in numbers])
        monkeypatch.setattr(sequences, "read", counted)
        known = kept(numbers, blocks)
        monkeypatch.setattr(sequences, "read", read)
        ours = loss_sum(draft, target, blocks, objective, False, None, known).item()
        assert ours == pytest.approx(loss_sum(draft, target, blocks, objective, False).item(), rel=1e-5)
        first = known if first is None else first
    assert torch.equal(known.features, first.features)
    assert reads == [(1, 13), (1, 9), (1, 27)]


def test_the_numbers_of_a_step_are_those_of_its_blocks():
    answers = random_responses(tuple(range(8, 20)))
    batches = Epochs(answers, 3, 2, False, seed=5)
    for step in range(9):
        blocks, numbers = batches(step), batches.indices(step)
        assert [answers[number].length for number in numbers] == blocks.lengths.tolist()
