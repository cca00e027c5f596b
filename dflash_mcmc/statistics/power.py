"""How many problems are needed to detect a difference between two runs on the same problems, with the tests of `paired`.

With one chain per problem, the test is the exact McNemar test of n problems. `discordant` is the share of problems that only
one run solves. The difference of accuracies is the share that only the better run solves, minus the share that only the other
run solves. The power is an exact sum over the number of discordant problems and over how many of them each run solves. The
usual formula (Connor 1987, "Sample size for testing differences in proportions for the paired-sample design") is for the
asymptotic test and gives too few problems for the exact test.

With several chains per problem, the test compares mean differences, and the spread over problems matters: `problems_by_spread`
and `detectable_by_spread` use the paired t test, which approximates the permutation test for many problems.
"""

from __future__ import annotations

import numpy as np

from dflash_mcmc.errors import UserError

_MOST = 10_000_000
"""The largest number of problems that the search tries."""
_TAIL = 1e-9


def power_of(problems: int, difference: float, discordant: float, level: float = 0.05) -> float:
    """Probability that the exact McNemar test detects the difference, in either direction, at this level.

    Args:
        problems: number of problems.
        difference: difference of the accuracies, a share.
        discordant: share of problems that only one of the runs solves; at least the difference.

    Raises:
        UserError: for a number out of its range.
    """
    from scipy.stats import binom

    _check("problems", problems, problems >= 1, "a whole number >= 1")
    _check("difference", difference, 0.0 < difference <= 1.0, "a number > 0 and <= 1")
    _check("discordant", discordant, difference <= discordant <= 1.0, f"a number >= {difference:g}, the difference, and <= 1")
    _check("level", level, 0.0 < level < 1.0, "a number > 0 and < 1")
    low, high = binom.ppf([_TAIL, 1.0 - _TAIL], problems, discordant)
    sizes = np.arange(int(low), int(high) + 1)
    better = min(1.0, (1.0 + difference / discordant) / 2.0)
    # The largest count of the rarer side with a two-sided p-value of at most `level`. The p-value is twice the smaller tail.
    largest = binom.ppf(level / 2.0, sizes, 0.5).astype(int)
    largest -= binom.cdf(largest, sizes, 0.5) > level / 2.0
    rejects = binom.cdf(largest, sizes, better) + binom.sf(sizes - largest - 1, sizes, better)
    return float(np.sum(binom.pmf(sizes, problems, discordant) * np.where(largest >= 0, rejects, 0.0)))


def problems_needed(difference: float, discordant: float, power: float = 0.8, level: float = 0.05) -> int:
    """The smallest number of problems that detects the difference with this power. Raises UserError."""
    _check("power", power, level < power < 1.0, f"a number > {level:g}, the level, and < 1")
    high = 2
    while power_of(high, difference, discordant, level) < power:
        high *= 2
        if high > _MOST:
            raise UserError(f"difference: given {difference:g}; allowed: one that fewer than {_MOST:,} problems detect")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(middle, difference, discordant, level) >= power else (middle, high)
    return high


def detectable(problems: int, discordant: float, power: float = 0.8, level: float = 0.05) -> float | None:
    """The smallest difference of the accuracies that this number of problems detects with this power, to 1e-6.

    None if even the largest difference, with all discordant problems on one side, is not detected. Raises UserError.
    """
    _check("power", power, level < power < 1.0, f"a number > {level:g}, the level, and < 1")
    if power_of(problems, discordant, discordant, level) < power:
        return None
    low, high = 0.0, discordant
    while high - low > 1e-6:
        middle = (low + high) / 2.0
        low, high = (low, middle) if power_of(problems, middle, discordant, level) >= power else (middle, high)
    return high


def problems_by_spread(difference: float, spread: float, power: float = 0.8, level: float = 0.05) -> int:
    """The smallest number of problems with which the paired t test detects the mean difference. Raises UserError.

    Args:
        spread: standard deviation of the difference over problems; > 0.
    """
    from statsmodels.stats.power import TTestPower

    _check("difference", difference, 0.0 < difference <= 1.0, "a number > 0 and <= 1")
    _check("spread", spread, spread > 0.0, "a number > 0")
    _check("power", power, level < power < 1.0, f"a number > {level:g}, the level, and < 1")
    low, high = 1, 2
    while TTestPower().power(difference / spread, high, level) < power:
        low, high = high, 2 * high
        if high > _MOST:
            raise UserError(f"difference: given {difference:g}; allowed: one that fewer than {_MOST:,} problems detect")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if TTestPower().power(difference / spread, middle, level) >= power else (middle, high)
    return high


def detectable_by_spread(problems: int, spread: float, power: float = 0.8, level: float = 0.05) -> float | None:
    """The smallest mean difference detected with this power. None for fewer than two problems, or if it exceeds 1."""
    from statsmodels.stats.power import TTestPower

    _check("spread", spread, spread > 0.0, "a number > 0")
    if problems < 2:
        return None
    found = spread * float(TTestPower().solve_power(None, problems, level, power))
    return found if found <= 1.0 else None


def _check(name: str, given: float, holds: bool, allowed: str) -> None:
    if not holds:
        raise UserError(f"{name}: given {given:g}; allowed: {allowed}")
