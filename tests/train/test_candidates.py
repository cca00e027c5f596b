"""A loss over some ids: with all ids it is the loss itself, and with random ones the sum over the vocabulary has no bias."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_mcmc.train.blocks import gather
from dflash_mcmc.train.loss import CandidateIds, Objective, loss_sum
from dflash_mcmc.train.responses import Response
from tests.train.drafts import random_draft, random_responses, random_target

OBJECTIVE = Objective("tokens", 1.0, 2.0)
OBJECTIVES = pytest.mark.parametrize("objective", [Objective(name, 3.0, 2.0) for name in ("tokens", "p", "p_alpha")],
                                     ids=lambda objective: objective.target)


@pytest.fixture(scope="module")
def target():
    return random_target()


def forbidden_of(target) -> np.ndarray:
    return target.forbidden.numpy()


def few() -> list[Response]:
    """Answers of the ids 4 (most often), 5 and 6 after prompts with other ids."""
    return [Response(np.array([1, 2, 4, 4, 4, 5], np.int32), 2), Response(np.array([1, 3, 4, 5, 6, 4], np.int32), 2)]


@OBJECTIVES
def test_all_ids_as_candidates_give_the_loss_over_all_ids(target, objective):
    draft, answers = random_draft(target), [Response(np.arange(58, dtype=np.int32), 4)]
    blocks = gather(answers, [np.array([4, 9, 30, 55])])
    every = CandidateIds(answers, 200, forbidden_of(target), 0)(0, blocks.tokens)
    assert (len(every.ids), every.num_certain) == (58, 58)
    ours = loss_sum(draft, target, blocks, objective, False, every)
    theirs = loss_sum(draft, target, blocks, objective, False)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    for mine, other in zip(*(torch.autograd.grad(value, list(draft.parameters())) for value in (ours, theirs)), strict=True):
        assert torch.allclose(mine, other, atol=1e-5 * other.abs().max())


def test_the_sum_over_candidates_has_no_bias(target):
    candidates = CandidateIds(few(), 12, forbidden_of(target), 3)
    hidden = 0.2 * torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    weight = target.head.weight.detach()
    exact = (hidden @ weight[:58].T).exp().sum(dim=-1)  # the last three ids have no token
    sums = torch.stack([candidates(step, torch.tensor([7, 8])).logits(hidden, weight, None).exp().sum(dim=-1)
                        for step in range(2000)])
    error = sums.std(dim=0) / len(sums) ** 0.5
    assert (error < 0.02 * exact).all()
    assert ((sums.mean(dim=0) - exact).abs() < 4 * error).all()


def test_candidates_are_the_steps_ids_the_frequent_ones_and_others_from_outside(target):
    candidates = CandidateIds(few(), 5, forbidden_of(target), 3)
    one, same, other = (candidates(step, torch.tensor([[9, 8], [9, 0]])) for step in (7, 7, 8))
    assert one.ids[: one.num_certain].tolist() == [0, 4, 5, 8, 9]  # 4 and 5 are the two most frequent ids of the answers
    outside = one.ids[one.num_certain :].tolist()
    assert len(outside) == 3
    assert not set(outside) & {0, 4, 5, 8, 9, 58, 59, 60}
    assert torch.equal(one.ids, same.ids)
    assert not torch.equal(one.ids, other.ids)
    assert one.places(torch.tensor([9, 0, 5])).tolist() == [4, 0, 2]


@OBJECTIVES
def test_the_loss_is_near_the_loss_over_all_ids(target, objective):
    draft, answers = random_draft(target), random_responses((13, 5, 27))
    blocks = gather(answers, [np.array(anchors) for anchors in ([4, 6, 11], [3], [5, 20, 24, 25])])
    candidates = CandidateIds(answers, 200, forbidden_of(target), 0)  # 29 ids are certain, and 100 times one of the others
    exact = loss_sum(draft, target, blocks, objective, False).item()
    found = [loss_sum(draft, target, blocks, objective, False, candidates(step, blocks.tokens)).item() for step in range(100)]
    assert np.mean(found) == pytest.approx(exact, rel=0.03)
    assert np.std(found) > 0
