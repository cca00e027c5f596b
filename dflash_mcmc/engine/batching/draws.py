"""Values of a draw that the host computes before its first decode step: its uniforms, and whether it has crossed its floor."""

from __future__ import annotations

import numpy as np

from dflash_mcmc.engine.batching.rows import Start
from dflash_mcmc.ops import Draw, Floor
from dflash_mcmc.types import Trajectory


def uniforms_of(draw: Draw) -> np.ndarray:
    """Uniforms of the positions that the draw may fill, float64; greedy decoding needs none."""
    length = max(draw.horizon - draw.trajectory.length, 0)
    if draw.params.temperature == 0.0:
        return np.full(length, 0.5)
    return draw.key.uniforms(draw.trajectory.length, draw.trajectory.length + length)


def until_abandoned(draw: Draw, along: Trajectory) -> int:
    """Number of tokens of `along` after the draw's trajectory, up to the first one at which the draw may be abandoned."""
    start, floor = draw.trajectory.length, draw.floor
    if floor is None or along.length == start:
        return along.length - start
    weights = floor.weights(along, start)
    crossed = [floor.crossed(float(weight), start + number) for number, weight in enumerate(weights, start=1)]
    return crossed.index(True) + 1 if True in crossed else len(crossed)


def is_abandoned(draw: Draw, trajectory: Trajectory) -> bool:
    """Whether the tokens that the draw shares with `along` have crossed its floor. If so, the draw ends without a step."""
    if draw.floor is None or trajectory.length == draw.trajectory.length:
        return False
    return draw.floor.crossed(float(draw.floor.weights(trajectory, draw.trajectory.length)[-1]), trajectory.length)


def start_of(draw: Draw, base: Trajectory, row: int, uniforms: np.ndarray, grid_origin: int) -> Start:
    """The start of a draw in a row.

    Args:
        base: the draw's trajectory, with the tokens that it shares with `along`.
        uniforms: the uniforms of the positions after `base`.
        grid_origin: position at which the draft's first block starts.
    """
    origin, first = len(base.prompt), base.sequence_length
    start = Start(row, int(base.sequence[-1]), first, origin + draw.horizon - 1, origin, uniforms, grid_origin=grid_origin)
    return start if draw.floor is None else _with_floor(start, draw.floor, draw.trajectory.length, base)


def _with_floor(start: Start, floor: Floor, length: int, base: Trajectory) -> Start:
    threshold = floor.log_uniform + floor.reference - floor.margin
    weights = floor.weights(base, length)
    return start._replace(alpha=floor.alpha, weight=float(weights[-1]) if len(weights) else 0.0, floor=threshold,
                          log_length=-np.inf if floor.length is None else float(np.log(floor.length)))
