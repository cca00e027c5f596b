"""The drafter draws from the corrected rows, each with the token drawn before it, and judges slots by their own confidence."""

from __future__ import annotations

import pytest
import torch

from dflash_mcmc.engine.speculative.drafter import Anchors
from dflash_mcmc.engine.speculative.slotwise import SlotwiseDrafter
from dflash_mcmc.engine.speculative.speculator import _offered
from tests.engine.speculative.slotwise_drafts import random_network, shape_of, small_table

DRAWN = torch.tensor([[2, 0], [1, 1], [0, 2]])
"""The tokens that are drawn in three slots of two rows."""


class Given(SlotwiseDrafter):
    """Gets its hidden states from the test."""

    states: torch.Tensor

    def hidden(self, anchors):
        return self.states


def proposal(kind: str, threshold: float = 0.0):
    """The drafter, its hidden states, and what it has given to `draw`: (logits, offered) for each slot."""
    table, given = small_table(), []
    drafter = Given(random_network(shape_of(kind, table.parts, 3 + (kind == "dflash2"), 2)), table.parts, threshold)
    drafter.states = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(4))

    def draw(logits, first, offered=None):
        given.append((logits[:, 0], offered))
        return DRAWN[first][:, None]

    anchors = Anchors(slice(0, 2), None, torch.tensor([[0, 1], [1, 2]]), torch.tensor([1, 1]), 2)
    drafted = drafter.propose(anchors, draw)
    assert torch.equal(drafted, DRAWN.t())
    return drafter, given


@pytest.mark.parametrize("kind", ["vanilla", "rnn", "dflash2"])
def test_each_slot_is_drawn_from_its_corrected_logits(kind):
    drafter, given = proposal(kind)
    previous = torch.cat([torch.tensor([[1], [2]]), DRAWN.t()[:, :2]], dim=1)
    expected = drafter.network.along(drafter.logits(drafter.states), drafter.states, previous)
    assert all(torch.equal(logits, expected[:, slot]) for slot, (logits, _) in enumerate(given))
    assert all(offered is None for _, offered in given)


def test_each_slot_is_judged_by_its_own_confidence():
    drafter, given = proposal("vanilla", 0.5)
    previous = torch.cat([torch.tensor([[1], [2]]), DRAWN.t()[:, :2]], dim=1)
    for slot, (_, offered) in enumerate(given):
        logits = drafter.network.confidence_logits(drafter.states[:, slot], previous[:, slot])
        assert torch.equal(offered, logits >= 0.0)


def test_a_block_ends_at_the_first_slot_that_is_not_offered():
    goes_on = {0: torch.tensor([True, False, True]), 1: torch.tensor([False, True, True]), 2: torch.tensor([True, True, True])}
    assert _offered(goes_on, torch.zeros(3, 4, dtype=torch.int64)).tolist() == [1, 0, 4]
    assert _offered({}, torch.zeros(3, 4, dtype=torch.int64)) is None
