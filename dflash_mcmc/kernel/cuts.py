"""Cuts: where a proposal's new suffix starts, and what the choice adds to the ratio.

A suffix may start at the places of a grid, or more often where the model becomes uncertain (arXiv 2605.30327). H_t is the
entropy of p before token t, and s_t = max(0, H_t - H_{t-1})^power with H_{-1} = 0. A state x is then cut at token m with
probability s_m / S(x), where S(x) sums s_t over its tokens. If no jump is positive, every place is equally likely. As
H_{-1} = 0, the first token has a positive jump unless the model is certain of it. So a chain can reach every sequence.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dflash_mcmc.rng import Key
from dflash_mcmc.types import Trajectory


class GridCuts(NamedTuple):
    """Every `grid`-th token of the state is equally likely, or every `grid`-th place up to the horizon."""

    grid: int
    past_end: bool
    """Whether places past the end of the state are drawn too. Such a cut changes nothing."""

    def draw(self, path: Trajectory, horizon: int, key: Key) -> int:
        """A cut, in tokens of the answer."""
        return self.grid * key.integer(num_places(horizon if self.past_end else path.length, self.grid))

    def log_ratio(self, path: Trajectory, proposal: Trajectory, cut: int) -> float:
        """g: log of the probability of this cut in the proposal, minus that in the state."""
        if self.past_end:
            return 0.0
        here, there = (num_places(state.length, self.grid) for state in (path, proposal))
        return math.log(here / there)

    def bound(self, path: Trajectory, cut: int) -> tuple[float, int | None]:
        """An upper bound for g, as `cut_bound` returns it. A proposal of n tokens has at least n / grid places."""
        return 0.0, None if self.past_end else self.grid * num_places(path.length, self.grid)

    def mean_redrawn(self, state: float, horizon: float) -> float:
        """Mean number of tokens after a cut, for a state of `state` tokens. A cut past its end redraws nothing."""
        places = max(1.0, state / self.grid)
        inside = places / max(1.0, horizon / self.grid) if self.past_end else 1.0
        return (state - (places - 1.0) * self.grid / 2) * inside


class EntropyCuts(NamedTuple):
    """A place is more likely where the entropy of p rises. Trajectories need entropies."""

    power: float

    def draw(self, path: Trajectory, horizon: int, key: Key) -> int:
        """A cut, in tokens of the answer."""
        return key.categorical(cut_probabilities(path, self.power))

    def log_ratio(self, path: Trajectory, proposal: Trajectory, cut: int) -> float:
        """g: log of the probability of this cut in the proposal, minus that in the state."""
        return log_cut_ratio(path, proposal, cut, self.power)

    def bound(self, path: Trajectory, cut: int) -> tuple[float, int | None]:
        """See `cut_bound`."""
        return cut_bound(path, cut, self.power)

    def mean_redrawn(self, state: float, horizon: float) -> float:
        """Mean number of tokens after a cut, as if the places were equally likely: the rises are not known beforehand."""
        return (state + 1.0) / 2


def num_places(length: int, grid: int) -> int:
    """Number of places 0, grid, 2 grid, ... below `length`."""
    return -(-length // grid)


def entropy_jumps(path: Trajectory, power: float) -> np.ndarray:
    """s_t of each token, float64 (length,). Raises ValueError for a trajectory without entropies."""
    if path.entropy is None:
        raise ValueError("cuts at jumps of the entropy need trajectories with entropies")
    rises = np.maximum(np.diff(path.entropy, prepend=0.0), 0.0)
    return np.where(rises > 0.0, rises**power, 0.0)


def cut_probabilities(path: Trajectory, power: float) -> np.ndarray:
    """The probability of each cut, float64 (length,)."""
    each = entropy_jumps(path, power)
    total = each.sum()
    return each / total if total > 0.0 else np.full(path.length, 1.0 / path.length)


def log_cut_ratio(path: Trajectory, proposal: Trajectory, cut: int, power: float) -> float:
    """Log of the probability of `cut` in `proposal`, minus that in `path`. Both have the same tokens before the cut.

    The jump at the cut depends only on these tokens. So the log ratio is log S(x) - log S(y) if `path` has a positive jump.
    """
    there, back = cut_probabilities(path, power)[cut], cut_probabilities(proposal, power)[cut]
    return math.log(back / there) if back > 0.0 else -math.inf


def cut_bound(path: Trajectory, cut: int, power: float) -> tuple[float, int | None]:
    """An upper bound for `log_cut_ratio` of every proposal from `cut`, for early rejection.

    S(y) is at least the sum of the jumps up to the cut, which `path` and y share. Without a positive jump in `path` the ratio
    is at most |x| / |y|.

    Returns:
        (bound, length): the bound in nats, and the length of `path` if log(length / |y|) has to be added, else None.
    """
    each = entropy_jumps(path, power)
    if each.sum() > 0.0:
        return math.log(each.sum() / each[: cut + 1].sum()), None
    return 0.0, path.length
