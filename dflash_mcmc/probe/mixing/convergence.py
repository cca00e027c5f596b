"""Whether parallel chains have converged: R-hat, effective sample size and autocorrelation of log p, from arviz.

R-hat is the rank-normalised split R-hat, and the effective sample size (ESS) is that of the bulk: Vehtari, Gelman, Simpson,
Carpenter & Buerkner 2021, "Rank-Normalization, Folding, and Localization: An Improved R-hat" (arXiv 1903.08008). What arviz
says of chains that hardly move is no measure of mixing (an ESS of all draws where they stand on one value, of twice the
chains where on several, an R-hat that is not a number), so those are told apart here: a chain adds no more to the ESS than
the states that it has stood in, and one that is stuck adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from dflash_mcmc.probe.mixing.chains import Cell, StepChain
from dflash_mcmc.rng import Key
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

LEAST_STEPS, LEAST_CHAINS = 4, 2
"""Steps that R-hat needs of a chain, since it is split into halves of two, and chains."""
LEAST_STEPS_OF_ESS = 20
"""Steps that ESS needs of a chain. Autocorrelations of the halves are added up in pairs of lags, as far as a half reaches:
below 10 steps there is no pair, so that whatever the chains do comes out as one constant above the number of draws; at 10
there is one, and four autoregressive chains (0.8), whose ESS is 0.11 of the draws, get 0.40 on average; at 20 it is 0.19."""
_ROUNDING = 1e7
"""An R-hat above it divides by what rounding has made of no variance at all: where a single one of 64 times 2,000 values
differs from the rest of its chain it is 1.3e3."""
MOST_LAGS, DRAWS = 20, 200
WINDOWS = ("all", "last_half", "last_stage")
"""Steps that are looked at: all, also those in which the state still grows; the second half, without that warm-up; those of
the last stage, which alone have one target."""


class Convergence(NamedTuple):
    """Of the parallel chains of a problem."""

    chains: int
    steps: int
    """Of each chain."""
    stuck: int
    """Chains that never left the state behind their first step here."""
    rhat: float | None
    """None where it is not defined: below two chains or four steps, or where all halves stand on one value. Infinite where
    halves differ, but nothing within them."""
    ess: float | None
    """Of all chains together, in draws and at most as many; 0 where all are stuck, None below `LEAST_STEPS_OF_ESS`."""


class Window(NamedTuple):
    """Steps of parallel chains, both arrays of shape (chains, steps): log p behind each (float64), whether it moved (bool)."""

    log_p: np.ndarray
    moved: np.ndarray

    @property
    def stuck(self) -> np.ndarray:
        """Whether a chain never left the state behind its first step here, bool (chains,)."""
        return ~self.moved[:, 1:].any(axis=1)


def window(chains: Sequence[StepChain], name: str) -> Window:
    """One of `WINDOWS`. Chains that have ended earlier than others are not padded: of each the last steps are taken, as many
    as the shortest has."""
    kept = [chain.block == chain.block[-1] if name == "last_stage" else np.ones(chain.num_steps, bool) for chain in chains]
    length = min(int(mask.sum()) for mask in kept)
    length -= length // 2 if name == "last_half" else 0

    def rows(values: str) -> np.ndarray:
        return np.stack([(found := getattr(chain, values)[mask])[len(found) - length :]
                         for chain, mask in zip(chains, kept, strict=True)])

    return Window(rows("log_p"), rows("moved"))


def convergence(steps: Window) -> Convergence:
    """Of parallel chains."""
    (chains, length), stuck = steps.log_p.shape, int(steps.stuck.sum())
    rhat = _rhat(steps.log_p) if chains >= LEAST_CHAINS and length >= LEAST_STEPS else math.nan
    return Convergence(chains, length, stuck, None if math.isnan(rhat) else rhat,
                       _ess(steps) if length >= LEAST_STEPS_OF_ESS else None)


def _rhat(log_p: np.ndarray) -> float:
    """NaN where all halves stand on one value; of an odd number of steps the one in the middle is in neither."""
    import arviz

    with np.errstate(divide="ignore", invalid="ignore"):  # of halves that are constant
        rhat = float(arviz.rhat(log_p, method="rank"))
    return math.inf if rhat > _ROUNDING else rhat


def _ess(steps: Window) -> float:
    """arviz's, but at most the states that the chains which move have stood in: a state is one draw, however long it is kept.

    So no more than the draws, which antithetic chains would pass; and nothing of chains that are stuck, whose one state is
    where they came into the window, and no draw of their own. Without it a single move of many chains, of which next to no
    variance is seen, would count as all their draws, and a cell look the better the less moves in it.
    """
    import arviz

    moves = steps.moved[:, 1:].sum(axis=1)
    states = float((moves + 1)[moves > 0].sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        return min(float(arviz.ess(steps.log_p, method="bulk")), states)


def autocorrelation(log_p: np.ndarray) -> np.ndarray:
    """Autocorrelation at lags 0, 1, ... of a chain that is not stuck: float64 (steps,), from log p of that shape.

    Sums are divided by the sum of squares around the chain's own mean: of short chains it is too small by about 1 / steps.
    """
    import arviz

    return np.asarray(arviz.autocorr(log_p), float)


def independent_autocorrelation(steps: int, lag: int) -> float:
    """Its expectation for independent draws: the sum of all products of two different ones is minus the sum of squares."""
    return -(steps - lag) / (steps * (steps - 1))


@cache
def independent_rhats(chains: int, steps: int) -> np.ndarray:
    """R-hat of independent draws, `DRAWS` times, float64 (DRAWS,): what perfect mixing gives in chains as short as these."""
    key = Key(0).fold_in("independent chains", chains, steps)
    return np.array([_rhat(draws) for draws in key.uniforms(0, DRAWS * chains * steps).reshape(DRAWS, chains, steps)])


def of_problems(cell: Cell, name: str) -> dict[str, Convergence]:
    """Of each problem's chains in a window."""
    return {problem: convergence(window(chains, name)) for problem, chains in cell.problems.items()}


def convergence_row(cell: Cell, name: str) -> dict:
    """R-hat of the problems, and how many chains are stuck. Problems with too few steps are counted apart.

    The median is over the problems whose R-hat is defined (`rhat_problems`), as are the shares above a limit; of two in the
    middle it is the larger, and None where it is infinite. `independent_above` are the shares that independent draws in as
    few chains of as few steps would give by themselves. `all_stuck` is the share of problems whose chains are all stuck:
    where they also agree there is no R-hat.
    """
    found, long = _long_enough(cell, name, LEAST_STEPS)
    clusters, rhats = Clusters(list(long)), {key: of.rhat for key, of in long.items() if of.rhat is not None}
    defined, values = Clusters(list(rhats)), np.array(list(rhats.values()))
    (inverse,) = defined.quantiles(1.0 / values, [0.5])  # infinite ones would spoil an interval
    draws = np.concatenate([np.empty(0), *(independent_rhats(long[key].chains, long[key].steps) for key in rhats)])
    rhat = IntervalEstimate(_inverted(inverse.value), _inverted(inverse.high), _inverted(inverse.low), defined.size)
    stuck = clusters.ratio([of.stuck for of in long.values()], [of.chains for of in long.values()])
    return {**cell.setting, "window": name, **_steps(found),
            **stuck.columns("stuck"), "chains": stuck.n,
            **clusters.mean([of.stuck == of.chains for of in long.values()]).columns("all_stuck"), "problems": clusters.size,
            **rhat.columns("rhat"), **_above(1.01, defined, values, draws), **_above(1.1, defined, values, draws),
            **defined.mean(np.isinf(values)).columns("rhat_infinite"), "rhat_problems": defined.size,
            "too_short": len(found) - len(long)}


def effective_samples_row(cell: Cell, name: str) -> dict:
    """Effective sample size by steps and by what the chains have cost, from their start on.

    A problem whose chains are all stuck adds its steps and cost, and nothing else: without it a cell would look the better
    the more of its chains are stuck. One of too few steps adds nothing at all, and is counted (`too_short`).
    """
    found, long = _long_enough(cell, name, LEAST_STEPS_OF_ESS)
    clusters, ess = Clusters(list(long)), [of.ess for of in long.values()]
    spent = [sum(chain.cost["token_forwards"] for chain in cell.problems[problem]) for problem in long]
    return {**cell.setting, "window": name, **_steps(found),
            **clusters.ratio(ess, [of.chains * of.steps for of in long.values()]).columns("ess_per_step"),
            **clusters.ratio(1000.0 * np.array(ess), spent).columns("ess_per_1000_token_forwards"),
            "problems": clusters.size, "too_short": len(found) - len(long)}


def autocorrelation_rows(cell: Cell, name: str) -> list[dict]:
    """Mean over problems and chains at each lag up to `MOST_LAGS`; those that are stuck have none and are counted.

    `independent` is what independent draws give in chains as short as these, -(n - lag) / (n (n - 1)) of n steps.
    """
    owners, curves, stuck = [], [], 0
    for problem, chains in cell.problems.items():
        steps = window(chains, name)
        if steps.log_p.shape[1] >= LEAST_STEPS:
            moving = [autocorrelation(row) for row in steps.log_p[~steps.stuck]]
            owners += [problem] * len(moving)
            curves += moving
            stuck += int(steps.stuck.sum())
    rows = []
    for lag in range(1, 1 + MOST_LAGS):
        reaching = [place for place, curve in enumerate(curves) if lag < len(curve)]
        clusters = Clusters([owners[place] for place in reaching])
        if reaching:
            independent = np.mean([independent_autocorrelation(len(curves[place]), lag) for place in reaching])
            rows.append({**cell.setting, "window": name, "lag": lag,
                         **clusters.mean([curves[place][lag] for place in reaching]).columns("autocorrelation"),
                         "independent": float(independent),
                         "chains": clusters.size, "stuck": stuck})
    return rows


def _long_enough(cell: Cell, name: str, least: int) -> tuple[dict[str, Convergence], dict[str, Convergence]]:
    """All problems, and those whose chains have at least so many steps."""
    found = of_problems(cell, name)
    return found, {problem: of for problem, of in found.items() if of.steps >= least}


def _above(limit: float, defined: Clusters, values: np.ndarray, draws: np.ndarray) -> dict[str, float | None]:
    return {**defined.mean(values > limit).columns(f"rhat_above_{limit}"),
            f"independent_above_{limit}": float(np.mean(draws > limit)) if len(draws) else None}


def _steps(found: dict[str, Convergence]) -> dict[str, int | None]:
    """Steps of each chain: the fewest and the most of any problem."""
    steps = [of.steps for of in found.values()]
    return {"fewest_steps": min(steps, default=None), "most_steps": max(steps, default=None)}


def _inverted(value: float | None) -> float | None:
    return 1.0 / value if value else None
