"""How parallel chains of a problem mix, from the traces of ordinary records: R-hat, effective sample size, autocorrelation.

R-hat is the rank-normalised split R-hat and the effective sample size (ESS) the bulk ESS of log p: Vehtari, Gelman, Simpson,
Carpenter & Buerkner 2021 (arXiv 1903.08008), as arviz-stats computes them. For chains that hardly move these numbers do not
measure mixing. If all chains stay at one value, the ESS equals the number of draws. This module therefore limits the ESS: a
chain adds at most the number of states that it visits, and a stuck chain adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.rng import Key

LEAST_STEPS, LEAST_CHAINS = 4, 2
"""Fewest steps and chains for R-hat. It splits each chain into two halves of at least two steps."""
LEAST_STEPS_OF_ESS = 20
"""Smallest number of steps for ESS.

The estimator sums autocorrelations of the half chains in pairs of lags. Below 10 steps there is no pair, and the result is a
constant above the number of draws. At 10 steps there is one pair: four autoregressive chains (coefficient 0.8), whose true ESS
is 0.11 of the draws, get 0.40 on average. At 20 steps they get 0.19.
"""
_ROUNDING = 1e7
"""A larger R-hat is treated as infinite, because its denominator is only rounding error."""
_DRAWS = 200
WINDOWS = ("all", "last half", "last stage")
"""Windows of steps.

All steps include those in which the state still grows. The last half leaves out this warm-up. The last stage is the only
window in which the target is always the same.
"""


_FIELDS = {"block", "length", "proposal_length", "log_p", "decision"}
"""What this module reads of a step; see `kernel.trace_entry`."""


class StepChain(NamedTuple):
    """The steps of a chain, arrays of shape (steps,)."""

    problem: str
    block: np.ndarray
    """The stage of each step, int64."""
    log_p: np.ndarray
    """Log p of the state after each step in nats, float64.

    It changes only if the chain moves, or between stages as the state grows. If the proposal repeats the state, the previous
    value is kept, because a recomputed one would differ by rounding.
    """
    moved: np.ndarray
    """Whether the step changed the state, bool."""
    accepted: np.ndarray
    """Whether the proposal was accepted, which may be equal to the state, bool."""


def chain_of(record: Mapping[str, Any]) -> StepChain | None:
    """The steps of a record; None if its trace is not that of one Metropolis-Hastings chain."""
    trace = record.get("trace") or ()
    if not trace or any("rung" in entry or not entry.keys() >= _FIELDS for entry in trace):
        return None
    block, length, proposed, log_p = (np.array([entry[name] for entry in trace])
                                      for name in ("block", "length", "proposal_length", "log_p"))
    moved = np.array([entry["decision"] == "accept" for entry in trace])
    accepted = moved | np.array([entry["decision"] == "identical" for entry in trace])
    after = np.where(moved, proposed, length)
    same = np.concatenate([[False], ~moved[1:] & (length[1:] == after[:-1])])
    kept = np.maximum.accumulate(np.where(same, 0, np.arange(len(trace))))
    return StepChain(record["problem"], block, log_p.astype(float)[kept], moved, accepted)


class Window(NamedTuple):
    """Steps of parallel chains, each array (chains, steps): log p after each step (float64), and what it did (bool)."""

    log_p: np.ndarray
    moved: np.ndarray
    accepted: np.ndarray

    @property
    def stuck(self) -> np.ndarray:
        """Whether a chain's state never changes after the first step of the window, bool (chains,)."""
        return self.moved[:, 1:].sum(axis=1) == 0


def window(chains: Sequence[StepChain], name: str) -> Window:
    """One of `WINDOWS`. If chains differ in length, each contributes as many of its last steps as the shortest one has."""
    kept = [chain.block == chain.block[-1] if name == "last stage" else np.ones(len(chain.block), bool) for chain in chains]
    length = min(int(mask.sum()) for mask in kept)
    length -= length // 2 if name == "last half" else 0

    def rows(column: str) -> np.ndarray:
        return np.stack([(own := getattr(chain, column)[mask])[len(own) - length :]
                         for chain, mask in zip(chains, kept, strict=True)])

    return Window(rows("log_p"), rows("moved"), rows("accepted"))


def rhat(steps: Window) -> float | None:
    """R-hat. None with fewer than two chains or four steps, and if all half chains have the same value.

    It is infinite if half chains differ but do not vary within themselves. With an odd number of steps, the middle one is in
    neither half.
    """
    chains, length = steps.log_p.shape
    value = _rhat(steps.log_p) if chains >= LEAST_CHAINS and length >= LEAST_STEPS else math.nan
    return None if math.isnan(value) else value


def _rhat(log_p: np.ndarray) -> float:
    from arviz_stats.base import array_stats

    with np.errstate(divide="ignore", invalid="ignore"):  # warnings for constant half chains
        value = float(array_stats.rhat(log_p, chain_axis=0, draw_axis=1, method="rank"))
    return math.inf if value > _ROUNDING else value


def ess(steps: Window) -> float | None:
    """ESS of all chains together, at most the number of states that the moving chains visit; None with too few steps.

    A state counts as one draw, regardless of how many steps it is kept. The limit also keeps the ESS of antithetic chains at
    or below the number of draws. Stuck chains add nothing, because their only state is the one with which they enter the
    window. Without the limit, many chains with a single move among them would have an ESS of all their draws, because log p
    hardly varies. A run would then look better the less its chains move.
    """
    from arviz_stats.base import array_stats

    if steps.log_p.shape[1] < LEAST_STEPS_OF_ESS:
        return None
    moves = steps.moved[:, 1:].sum(axis=1)
    states = float((moves + 1)[moves > 0].sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        return min(float(array_stats.ess(steps.log_p, chain_axis=0, draw_axis=1, method="bulk")), states)


def autocorrelation(log_p: np.ndarray) -> np.ndarray:
    """Autocorrelation at lags 0, 1, ... of a chain that is not stuck, float64 (steps,), from its log p.

    The divisor is the sum of squares around the chain's own mean. For short chains the result is too small by about 1 / steps.
    """
    from arviz_stats.base import array_stats

    return np.asarray(array_stats.autocorr(log_p), float)


def independent_autocorrelation(steps: int, lag: int) -> float:
    """The expected autocorrelation of independent draws.

    It is negative: for deviations from their own mean, the products of all ordered pairs of different draws sum to minus the
    sum of squares.
    """
    return -(steps - lag) / (steps * (steps - 1))


@cache
def independent_rhats(chains: int, steps: int) -> np.ndarray:
    """R-hat of 200 sets of independent draws, float64 (200,). They show perfect mixing in equally short chains."""
    key = Key(0).fold_in("independent chains", chains, steps)
    return np.array([_rhat(draws) for draws in key.uniforms(0, _DRAWS * chains * steps).reshape(_DRAWS, chains, steps)])
