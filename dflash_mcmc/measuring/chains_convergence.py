"""Whether parallel chains have converged: R-hat, effective sample size and autocorrelation of log p, from arviz.

R-hat is the rank-normalised split R-hat, and the effective sample size (ESS) is that of the bulk: Vehtari, Gelman, Simpson,
Carpenter & Buerkner 2021, "Rank-Normalization, Folding, and Localization: An Improved R-hat" (arXiv 1903.08008). What arviz
says of chains that never move is no measure of mixing (an ESS of all draws where they stand on one value, of twice the
chains where on several, an R-hat that is not a number), so those are told apart here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from dflash_mcmc.intervals import Clusters, Estimate
from dflash_mcmc.measuring.chains import Cell, Chain
from dflash_mcmc.rng import Key

LEAST_STEPS, LEAST_CHAINS = 4, 2
"""Steps that a chain needs, since it is split into halves of two, and chains that R-hat needs."""
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
    """None where it is not defined: below two chains or four steps, or where all stand on one value all the time. Infinite
    where chains differ, but not within their halves."""
    ess: float | None
    """Of all chains together, in draws; 0 where all are stuck, None below four steps."""


class Window(NamedTuple):
    """Steps of parallel chains, both arrays of shape (chains, steps): log p behind each (float64), whether it moved (bool)."""

    log_p: np.ndarray
    moved: np.ndarray

    @property
    def stuck(self) -> np.ndarray:
        """Whether a chain never left the state behind its first step here, bool (chains,)."""
        return ~self.moved[:, 1:].any(axis=1)


def window(chains: Sequence[Chain], name: str) -> Window:
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
    if length < LEAST_STEPS:
        return Convergence(chains, length, stuck, None, None)
    defined = chains >= LEAST_CHAINS and np.ptp(steps.log_p) > 0.0
    return Convergence(chains, length, stuck, _rhat(steps.log_p) if defined else None,
                       0.0 if stuck == chains else _ess(steps.log_p))


def _rhat(log_p: np.ndarray) -> float:
    import arviz

    with np.errstate(divide="ignore", invalid="ignore"):  # of halves that are constant
        return float(arviz.rhat(log_p, method="rank"))


def _ess(log_p: np.ndarray) -> float:
    import arviz

    with np.errstate(divide="ignore", invalid="ignore"):
        return float(arviz.ess(log_p, method="bulk"))


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

    The median is over the problems whose R-hat is defined, of two in the middle the larger; None where it is infinite.
    `independent_above` are the shares that independent draws in as few chains of as few steps would give by themselves.
    `all_stuck` is the share of problems whose chains are all stuck: where they also agree there is no R-hat, and shares above
    a limit are among the others.
    """
    found, long = _long_enough(cell, name)
    clusters, rhats = Clusters(list(long)), {key: of.rhat for key, of in long.items() if of.rhat is not None}
    defined, values = Clusters(list(rhats)), np.array(list(rhats.values()))
    (inverse,) = defined.quantiles(1.0 / values, [0.5])  # infinite ones would spoil an interval
    draws = np.concatenate([np.empty(0), *(independent_rhats(long[key].chains, long[key].steps) for key in rhats)])
    rhat = Estimate(_inverted(inverse.value), _inverted(inverse.high), _inverted(inverse.low), defined.size)
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
    the more of its chains are stuck.
    """
    found, long = _long_enough(cell, name)
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


def _long_enough(cell: Cell, name: str) -> tuple[dict[str, Convergence], dict[str, Convergence]]:
    """All problems, and those whose chains have enough steps."""
    found = of_problems(cell, name)
    return found, {problem: of for problem, of in found.items() if of.steps >= LEAST_STEPS}


def _above(limit: float, defined: Clusters, values: np.ndarray, draws: np.ndarray) -> dict[str, float | None]:
    return {**defined.mean(values > limit).columns(f"rhat_above_{limit}"),
            f"independent_above_{limit}": float(np.mean(draws > limit)) if len(draws) else None}


def _steps(found: dict[str, Convergence]) -> dict[str, int | None]:
    """Steps of each chain: the fewest and the most of any problem."""
    steps = [of.steps for of in found.values()]
    return {"fewest_steps": min(steps, default=None), "most_steps": max(steps, default=None)}


def _inverted(value: float | None) -> float | None:
    return 1.0 / value if value else None
