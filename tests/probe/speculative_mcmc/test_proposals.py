"""Distances and draws compared with float64 loops and numbers by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dflash_mcmc.probe.speculative_mcmc.weighing import distances, draw, log_probability


def laws(target, draft, alpha, temperature) -> tuple[np.ndarray, np.ndarray]:
    def law(logits):
        weights = [math.exp(x) if x > -math.inf else 0.0 for x in logits]
        return np.array(weights) / sum(weights)

    return law([alpha * x for x in target]), law([x / temperature for x in draft])


def test_two_tokens_by_hand():
    """p = (0.8, 0.2), q = (0.5, 0.5): KL = 0.8 log 1.6 + 0.2 log 0.4, TVD 0.3; squared p = (16, 1)/17."""
    target, draft = torch.tensor([[math.log(0.8), math.log(0.2)]]), torch.tensor([[1.0, 1.0]])
    plain = distances(target, draft, 1.0, 1.0)
    assert plain.kl.item() == pytest.approx(0.8 * math.log(1.6) + 0.2 * math.log(0.4), rel=1e-5)
    assert plain.total_variation.item() == pytest.approx(0.3, rel=1e-5)
    sharp = distances(target, draft, 2.0, 1.0)
    assert sharp.total_variation.item() == pytest.approx(16 / 17 - 0.5, rel=1e-5)
    assert sharp.kl.item() == pytest.approx(16 / 17 * math.log(32 / 17) + 1 / 17 * math.log(2 / 17), rel=1e-5)


def test_the_document_s_example_of_alpha():
    """Section 4.1: 0.80 and 0.15 against 0.50 and 0.30; p^4 gives the first token 99.9 %, and TVD grows."""
    target, draft = torch.tensor([[0.80, 0.15, 0.05]]).log(), torch.tensor([[0.50, 0.30, 0.20]]).log()
    assert torch.softmax(4 * target, -1)[0, 0].item() == pytest.approx(0.9988, abs=1e-4)
    assert distances(target, draft, 1.0, 1.0).total_variation.item() == pytest.approx(0.30, abs=1e-6)
    assert distances(target, draft, 4.0, 1.0).total_variation.item() > 0.49
    # q sharpened in the same way gives the wrong token 11 %, as the document says.
    assert torch.softmax(4 * draft, -1)[0, 1].item() == pytest.approx(0.112, abs=1e-3)


@pytest.mark.parametrize(("alpha", "temperature"), [(1.0, 1.0), (4.0, 1.0), (4.0, 0.25), (2.5, 0.7)])
def test_against_loops(alpha, temperature):
    generator = torch.Generator().manual_seed(0)
    target, draft = (3 * torch.randn(9, 11, generator=generator) for _ in range(2))
    target[:, -2:] = draft[:, -2:] = -torch.inf  # ids without a token
    found = distances(target, draft, alpha, temperature)
    for row in range(9):
        p, q = laws(target[row].tolist(), draft[row].tolist(), alpha, temperature)
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
        assert found.kl[row].item() == pytest.approx(kl, rel=1e-4, abs=1e-6)
        assert found.total_variation[row].item() == pytest.approx(0.5 * np.abs(p - q).sum(), rel=1e-4, abs=1e-6)


def test_equal_distributions_have_distance_zero():
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
    found = distances(logits, logits, 4.0, 0.25)
    assert found.kl.max() < 1e-6
    assert found.total_variation.max() < 1e-6


def test_draws_follow_q_and_have_its_probabilities():
    logits = torch.tensor([[1.0, -torch.inf, 0.0, 2.0], [0.0, 0.0, 0.0, -torch.inf]])
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5).div(20_000).expand(2, -1)
    drawn = draw(logits, 0.5, grid)
    law = torch.softmax(logits.double() / 0.5, dim=-1)
    for row in range(2):
        shares = torch.bincount(drawn.tokens[row], minlength=4) / 20_000
        torch.testing.assert_close(shares.double(), law[row], atol=1e-4, rtol=0)
        torch.testing.assert_close(drawn.log_q[row], law[row].log()[drawn.tokens[row]], atol=1e-6, rtol=1e-6)
    assert (drawn.tokens[0] != 1).all()
    assert (drawn.tokens[1] != 3).all()


def test_extreme_uniforms_draw_valid_tokens():
    logits = torch.tensor([[-torch.inf, 0.0, 30.0, -torch.inf]])
    tokens = draw(logits, 1.0, torch.tensor([[2.0**-53, 1 - 2.0**-53]], dtype=torch.float64)).tokens
    assert tokens.tolist() == [[1, 2]]


def test_log_probability_equals_the_softmax():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(2))
    tokens = torch.tensor([[0, 6], [1, 1], [5, 2]])
    torch.testing.assert_close(log_probability(logits, tokens), torch.log_softmax(logits.double(), -1).gather(1, tokens))
