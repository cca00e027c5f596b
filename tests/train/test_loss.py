"""The loss: all blocks in one pass equal single blocks, the weights of slots, and the minimum of the KL divergence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from dflash_mcmc.train import loss as losses
from dflash_mcmc.train.blocks import TrainingBlocks, gather
from dflash_mcmc.train.loss import Objective, kl_divergences, loss_sum, slot_weights
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


def test_weights_fall_by_e_every_gamma_slots_and_are_zero_after_the_end():
    blocks = gather(random_responses((10, 8)), [np.array([4, 7]), np.array([6])])
    weights = slot_weights(blocks, BLOCK_SIZE - 1, GAMMA)
    full = [math.exp(-k / GAMMA) for k in range(4)]
    assert weights[0, 0].tolist() == pytest.approx(full)
    assert weights[0, 1].tolist() == pytest.approx([*full[:2], 0, 0])
    assert weights[1, 0].tolist() == pytest.approx([full[0], 0, 0, 0])
    assert weights[1, 1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("alpha", [1.0, 3.0])
def test_kl_divergence_is_smallest_at_p_alpha(alpha):
    target = torch.tensor([[0.3, -1.2, 2.0, -torch.inf, 0.7], [0.0, 0.1, 0.2, -torch.inf, -2.0]]).double()
    best = (alpha * target).requires_grad_()
    value = kl_divergences(best, target, alpha)
    (gradient,) = torch.autograd.grad(value.sum(), best)
    assert value.tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    assert gradient.abs().max() < 1e-12
    for shift in torch.eye(5).double()[[0, 1, 2, 4]]:
        assert (kl_divergences(alpha * target + 0.3 * shift, target, alpha) > 1e-7).all()
    flat = torch.zeros(2, 5).double().masked_fill(torch.isneginf(target), -torch.inf).requires_grad_()
    (gradient,) = torch.autograd.grad(kl_divergences(flat, target, alpha).sum(), flat)
    p = torch.softmax(alpha * target, dim=-1)
    assert torch.allclose(gradient, torch.softmax(flat.detach(), dim=-1) - p, atol=1e-6)
