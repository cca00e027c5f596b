"""The setting of a sampler whose cost is nearest to a budget, by an estimate that measured costs correct."""

from __future__ import annotations

import math
from collections.abc import Callable

MOST = 1_000_000
"""The largest setting that is tried."""


class CostCurve:
    """The expected cost of an answer as a function of a setting, a whole number.

    The estimate is multiplied by measured / estimated. Between two measured settings the logarithm of this factor is
    interpolated over the logarithm of the estimate, and outside it is that of the nearest one. The curve rises if the estimate
    and the measured costs rise.

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
        import numpy as np

        estimated = self.estimate(setting)
        if not self.measured:
            return estimated
        places = {math.log(self.estimate(known)): math.log(cost / self.estimate(known))
                  for known, cost in sorted(self.measured.items())}
        return estimated * math.exp(np.interp(math.log(estimated), list(places), list(places.values())))

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
