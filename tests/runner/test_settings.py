"""The choice of a setting: nearest to the budget, monotone, and corrected by measured costs."""

from __future__ import annotations

import itertools

import pytest

from dflash_mcmc.runner.budget import MOST, CostCurve


def true_cost(setting: int) -> float:
    """Draws that share forwards: the cost rises more slowly than the number of draws."""
    return 60.0 + 90.0 * setting**0.8


def estimate(setting: int) -> float:
    return 57.0 + 40.0 * setting


def settled(budgets: list[float]) -> CostCurve:
    """A curve after three measurements for each budget, in ascending order, as the pilots make them."""
    curve = CostCurve(estimate, 1)
    for budget in budgets:
        for _ in range(3):
            setting = curve.nearest(budget)
            curve.measured[setting] = true_cost(setting)
    return curve


def test_the_nearest_setting_is_that_of_a_search_over_all():
    curve = CostCurve(estimate, 2)
    for budget in (10.0, 137.0, 158.0, 900.0, 12_345.0):
        assert curve.nearest(budget) == min(range(2, 2000), key=lambda n: max(budget / curve.cost(n), curve.cost(n) / budget))


def test_the_choice_is_monotone_in_the_budget_before_and_after_measurements():
    for curve in (CostCurve(estimate, 1), settled([500.0, 4000.0])):
        chosen = [curve.nearest(budget) for budget in range(100, 20_000, 37)]
        assert chosen == sorted(chosen)
        costs = [curve.cost(setting) for setting in range(1, 400)]
        assert all(a < b for a, b in itertools.pairwise(costs))


@pytest.mark.parametrize("budget", [500.0, 2000.0, 8000.0, 30_000.0])
def test_three_measurements_bring_the_cost_within_five_per_cent(budget):
    before = true_cost(CostCurve(estimate, 1).nearest(budget))
    after = true_cost(settled([budget]).nearest(budget))
    assert abs(after - budget) < 0.05 * budget + 40.0  # 40: half of the step between two settings
    assert abs(after - budget) < abs(before - budget)


def test_a_measured_setting_has_its_measured_cost():
    curve = settled([500.0, 4000.0])
    assert all(curve.cost(setting) == pytest.approx(cost) for setting, cost in curve.measured.items())


def test_a_cost_that_does_not_rise_is_no_endless_search():
    with pytest.raises(ValueError, match="less than the budget of 9"):
        CostCurve(lambda setting: 8.0, 1).nearest(9.0)
    assert MOST >= 100_000
