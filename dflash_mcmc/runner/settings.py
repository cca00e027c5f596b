"""The setting of a sampler whose cost is nearest to a budget, by an estimate that measured costs correct."""

from __future__ import annotations

import math
from collections.abc import Callable

MOST = 1_000_000
"""The largest setting that is tried."""
_LEAST_SLOPE = 0.2


class CostCurve:
    """The expected cost of an answer as a function of a setting, a whole number.

    With one measured setting, the estimate is multiplied by its measured / estimated. With more, the logarithm of the cost is
    linear in the logarithm of the estimate between neighbouring measured settings. Outside, it continues the nearest such
    line, with a slope of at least 0.2 and at most 1: forwards that draws share make the cost rise more slowly than the
    estimate. The curve rises if the estimate and the measured costs rise.

    Args:
        estimate: the cost before anything is measured; it rises with the setting.
        least: the smallest setting.
    """

    def __init__(self, estimate: Callable[[int], float], least: int):
        self.estimate, self.least = estimate, least
        self.measured: dict[int, float] = {}
        """Measured cost of an answer, by setting."""

    def cost(self, setting: int) -> float:
        """The expected cost of an answer."""
        place = math.log(self.estimate(setting))
        known = sorted((math.log(self.estimate(other)), math.log(cost)) for other, cost in self.measured.items())
        if not known:
            return math.exp(place)
        if len(known) == 1:
            return math.exp(known[0][1] + place - known[0][0])
        left = max(0, min(len(known) - 2, sum(x <= place for x, _ in known) - 1))
        (x, y), (next_x, next_y) = known[left], known[left + 1]
        slope = (next_y - y) / (next_x - x)
        if place < x:
            return math.exp(y + _clipped(slope) * (place - x))
        if place > next_x:
            return math.exp(next_y + _clipped(slope) * (place - next_x))
        return math.exp(y + slope * (place - x))

    def nearest(self, budget: float) -> int:
        """The setting whose cost has the smallest ratio to the budget, or of the budget to it; the smaller one in a tie.

        Raises ValueError if the largest setting that is tried costs less than the budget.
        """
        low, high = self.least, self.least
        if self.cost(low) >= budget:
            return low
        while self.cost(high) < budget:
            low, high = high, 2 * high
            if high > MOST:
                raise ValueError(f"a setting of {low:,} costs {self.cost(low):,.0f}, less than the budget of {budget:,.0f}")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.cost(middle) < budget else (low, middle)
        return low if budget / self.cost(low) <= self.cost(high) / budget else high


def _clipped(slope: float) -> float:
    return min(1.0, max(_LEAST_SLOPE, slope))
