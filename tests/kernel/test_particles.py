"""Weights of particles by hand, and parents that follow their weights."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mcmc.kernel import particles
from dflash_mcmc.rng import Key
from dflash_mcmc.testing import EnumeratedKey, Enumerator

LOG_WEIGHTS = np.log(np.array([1.0, 3.0, 0.0, 4.0]) + 1e-300)


def test_weights_by_hand():
    assert particles.log_mean(LOG_WEIGHTS) == pytest.approx(np.log(2.0))
    assert particles.shares(LOG_WEIGHTS) == pytest.approx([0.125, 0.375, 0.0, 0.5])
    assert particles.effective_size(LOG_WEIGHTS) == pytest.approx(64.0 / 26.0)
    assert particles.effective_size(np.full(5, -7.0)) == pytest.approx(5.0)


def test_equal_weights_are_not_low():
    assert not particles.is_low(np.full(5, np.log(0.1)), 1.0)
    assert particles.systematic(np.zeros(4), Key(0)) == [0, 1, 2, 3]
    assert particles.is_low(LOG_WEIGHTS, 0.7)
    assert not particles.is_low(LOG_WEIGHTS, 0.6)


def systematic(key) -> tuple[int, ...]:
    return tuple(particles.systematic(LOG_WEIGHTS, key))


def test_systematic_parents_by_hand():
    """N * weights are 0.5, 1.5, 0 and 2, so the points u0 + i give the parents 0133 for u0 below 0.5, else 1133."""
    enumerator, law = Enumerator(), dict[tuple, float]()
    while True:
        parents = systematic(EnumeratedKey(enumerator))
        law[parents] = law.get(parents, 0.0) + enumerator.probability
        if not enumerator.next_branch():
            break
    assert law == {(0, 1, 3, 3): pytest.approx(0.5), (1, 1, 3, 3): pytest.approx(0.5)}


def test_multinomial_parents_never_have_weight_zero():
    parents = particles.multinomial(LOG_WEIGHTS, 400, Key(0))
    shares = np.bincount(parents, minlength=4) / 400
    assert shares[2] == 0.0
    assert shares == pytest.approx([0.125, 0.375, 0.0, 0.5], abs=0.08)
