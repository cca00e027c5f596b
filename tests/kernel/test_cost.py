"""Expected costs by hand."""

from __future__ import annotations

import pytest

from dflash_mcmc.kernel.cost import doubling, doubling_cost, mh_cost
from dflash_mcmc.types import ExpectedCost


def half(state: float, reach: float) -> float:
    return (state + 1) / 2


def test_stages_that_double():
    assert [doubling(count) for count in (1, 2, 3, 4, 5, 8)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_a_chain_of_two_stages():
    """Stages of 4 and 6 tokens: 3 steps draw 2.5 and 3.5 tokens after prefixes of 1.5 and 2.5, and one extension keeps 4."""
    found = mh_cost(6.0, 8, 2, 3, half, stops=False)
    assert found == ExpectedCost(6.0, 3 * 6.0, 0.0, 2 + 3 * 2, pytest.approx(3 * 4.0 + 4.0))


def test_a_chain_that_stops_with_its_answer():
    found = mh_cost(3.0, 8, 2, 3, half, stops=True)
    assert found == ExpectedCost(3.0, 3 * 2.0, 0.0, 1 + 3, pytest.approx(3 * 1.0))


def test_a_chain_whose_stages_double():
    """The answer of 3 tokens passes the horizons 1 and 2 of 8, and the last stage is at 8."""
    found = doubling_cost(3.0, 8, 8, 1, half)
    assert found == ExpectedCost(3.0, 1.0 + 1.5 + 2.0, 0.0, 3 + 3, pytest.approx(0.0 + 0.5 + 1.0 + 0.0 + 1.0 + 2.0))
