"""Where a suffix may start: places on a grid, or jumps of the entropy.

At jumps of the entropy a suffix starts more often where the model becomes uncertain (arXiv 2605.30327).

H_t is the entropy of p before token t, and s_t = max(0, H_t - H_{t-1})^power with H_{-1} = 0. A state x is cut at token m with
probability s_m / S(x), where S(x) sums s_t over its tokens. If no jump is positive, every place is equally likely. As
H_{-1} = 0, the first token has a positive jump unless the model is certain of it. So a chain can reach every sequence.
"""

from __future__ import annotations

import math

import numpy as np

from dflash_mcmc.types import Trajectory


def places(length: int, grid: int) -> int:
    """Number of places 0, grid, 2 grid, ... below `length`."""
    return -(-length // grid)


def jumps(path: Trajectory, power: float) -> np.ndarray:
    """s_t of each token, float64 (length,). Raises ValueError for a trajectory without entropies."""
    if path.entropy is None:
        raise ValueError("cuts at jumps of the entropy need trajectories with entropies")
    rises = np.maximum(np.diff(path.entropy, prepend=0.0), 0.0)
    return np.where(rises > 0.0, rises**power, 0.0)


def probabilities(path: Trajectory, power: float) -> np.ndarray:
    """The probability of each cut, float64 (length,)."""
    each = jumps(path, power)
    total = each.sum()
    return each / total if total > 0.0 else np.full(path.length, 1.0 / path.length)


def log_ratio(path: Trajectory, proposal: Trajectory, cut: int, power: float) -> float:
    """Log of the probability of `cut` in `proposal`, minus that in `path`. Both have the same tokens before the cut.

    The jump at the cut depends only on these tokens. So the log ratio is log S(x) - log S(y) if `path` has a positive jump.
    """
    there, back = probabilities(path, power)[cut], probabilities(proposal, power)[cut]
    return math.log(back / there) if back > 0.0 else -math.inf


def bound(path: Trajectory, cut: int, power: float) -> tuple[float, int | None]:
    """An upper bound for `log_ratio` of every proposal from `cut`, for early rejection.

    S(y) is at least the sum of the jumps up to the cut, which `path` and y share. Without a positive jump in `path` the ratio
    is at most |x| / |y|.

    Returns:
        (bound, length): the bound in nats, and the length of `path` if log(length / |y|) has to be added, else None.
    """
    each = jumps(path, power)
    if each.sum() > 0.0:
        return math.log(each.sum() / each[: cut + 1].sum()), None
    return 0.0, path.length
