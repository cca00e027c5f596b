"""Simulated acceptance compared with the exact one of a small case; the document's derived numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dflash_mcmc.probe.speculative_mcmc.weighing import (
    acceptance_floor,
    chance_of_moves,
    effective_samples,
    in_equilibrium,
    simulate,
)

TARGET, PROPOSAL = np.array([0.6, 0.25, 0.1, 0.05]), np.array([0.2, 0.2, 0.3, 0.3])
WEIGHTS = TARGET / PROPOSAL
EXACT = sum(TARGET[x] * PROPOSAL[y] * min(1.0, WEIGHTS[y] / WEIGHTS[x]) for x, y in itertools.product(range(4), repeat=2))
MOVED = sum(TARGET[x] * PROPOSAL[y] * min(1.0, WEIGHTS[y] / WEIGHTS[x]) for x, y in itertools.permutations(range(4), 2))


def samples(rows: int, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).choice(4, size=(rows, count), p=PROPOSAL)


def test_long_chains_have_the_exact_acceptance():
    drawn = samples(400, 500, 0)
    found = simulate(np.log(WEIGHTS)[drawn], np.random.default_rng(1).random((400, 499)), drawn[..., None])
    for share, exact in ((found.acceptance, EXACT), (found.moved, MOVED)):
        assert abs(share.mean() - exact) < 4 * share.std() / 20 + 2e-3


def test_a_chain_that_accepts_the_other_way_round_does_not():
    """The mutant: w(x) / w(y) instead of w(y) / w(x)."""
    drawn = samples(400, 500, 0)
    wrong = simulate(-np.log(WEIGHTS)[drawn], np.random.default_rng(1).random((400, 499)), drawn[..., None]).acceptance
    assert abs(wrong.mean() - EXACT) > 0.05


def test_equilibrium_is_estimated_without_a_chain():
    drawn = samples(2000, 100, 2)
    found = in_equilibrium(np.log(WEIGHTS)[drawn])
    assert abs(found.mean() - EXACT) < 0.01
    for row in range(3):  # pair by pair
        w = WEIGHTS[drawn[row]]
        pairs = sum(min(w[i], w[j]) for i, j in itertools.permutations(range(100), 2))
        assert found[row] == pytest.approx(pairs / (99 * w.sum()))


def test_very_small_weights():
    drawn = samples(5, 20, 3)
    small = np.log(WEIGHTS)[drawn] - 5000.0
    np.testing.assert_allclose(in_equilibrium(small), in_equilibrium(small + 5000.0))
    np.testing.assert_allclose(effective_samples(small), effective_samples(small + 5000.0))


def test_a_step_by_hand():
    """Weights 1, 2, 0.5, 0.5: the second is accepted, the third with probability 1/4; then the fourth is accepted."""
    log_weights, tokens = np.log([[1.0, 2.0, 0.5, 0.5]] * 2), np.array([[[7, 0], [7, 1], [8, 1], [8, 1]]] * 2)
    found = simulate(log_weights, np.array([[0.99, 0.2, 0.99], [0.99, 0.3, 0.3]]), tokens)
    np.testing.assert_allclose(found.acceptance, [1.0, 1 / 3])
    np.testing.assert_allclose(found.moved, [2 / 3, 1 / 3]), "the fourth is the third again"


def test_even_weights_are_always_accepted_and_count_in_full():
    flat = np.full((1, 10), -3.0)
    assert simulate(flat, np.full((1, 9), 0.999999), np.arange(10)[None, :, None]).acceptance == 1.0
    assert in_equilibrium(flat)[0] == pytest.approx(1.0)
    assert effective_samples(flat)[0] == pytest.approx(10.0)


def test_the_floor_of_the_simulated_acceptance():
    """Weights differ by thousands of nats: the true acceptance is 0, the simulated one is the floor, 4.2 % at K = 100."""
    assert acceptance_floor(2) == 0.5
    assert acceptance_floor(100) == pytest.approx(0.0423, abs=1e-4)
    weights = 1e4 * np.random.default_rng(4).random((4000, 100))
    found = simulate(weights, np.random.default_rng(5).random((4000, 99)), np.tile(np.arange(100), (4000, 1))[..., None])
    assert abs(found.acceptance.mean() - acceptance_floor(100)) < 4 * found.acceptance.std() / math.sqrt(4000)
    np.testing.assert_array_equal(found.acceptance, found.moved)
    assert in_equilibrium(weights).mean() < 1e-3


def test_the_document_s_chances():
    """Section 4.3. The document's 65 % and 7 % are right; its 99.5 % and 99 % should be 99.9 % and 96 %."""
    assert chance_of_moves(0.10, 10, 1) == pytest.approx(1 - 0.9**10) == pytest.approx(0.65, abs=0.005)
    assert chance_of_moves(0.10, 10, 3) == pytest.approx(0.07, abs=0.005)
    assert chance_of_moves(0.53, 10, 1) == pytest.approx(1 - 0.47**10) == pytest.approx(0.9995, abs=5e-5)
    assert chance_of_moves(0.53, 10, 3) == pytest.approx(0.963, abs=5e-4)
    assert chance_of_moves(0.0, 10, 1) == 0.0
    assert chance_of_moves(1.0, 3, 3) == 1.0
