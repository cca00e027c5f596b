"""What the host knows of a draw before a step is taken: its uniforms, its floor, and whether that is crossed already."""

from __future__ import annotations

import numpy as np

from dflash_mcmc.engine.rows import Start
from dflash_mcmc.ops import Draw
from dflash_mcmc.types import Trajectory


def uniforms_of(draw: Draw) -> np.ndarray:
    """Of the positions that the draw may fill, float64; greedy decoding takes none."""
    length = max(draw.horizon - draw.trajectory.length, 0)
    if draw.params.temperature == 0.0:
        return np.full(length, 0.5)
    return draw.key.uniforms(draw.trajectory.length, draw.trajectory.length + length)


def until_abandoned(draw: Draw, along: Trajectory) -> int:
    """Tokens of `along` after the draw's path up to the one at which the draw may be abandoned; all where at none."""
    start, floor = draw.trajectory.length, draw.floor
    if floor is None or along.length == start:
        return along.length - start
    weights = floor.weights(along, start)
    crossed = [floor.crossed(float(weight), start + number) for number, weight in enumerate(weights, start=1)]
    return crossed.index(True) + 1 if True in crossed else len(crossed)


def is_abandoned(draw: Draw, trajectory: Trajectory) -> bool:
    """Whether a draw ends here: what it shares with the path that it goes along has crossed its floor."""
    if draw.floor is None or trajectory.length == draw.trajectory.length:
        return False
    return draw.floor.crossed(float(draw.floor.weights(trajectory, draw.trajectory.length)[-1]), trajectory.length)


def with_floor(start: Start, draw: Draw, base: Trajectory) -> Start:
    """The start of a draw whose path is `base` by now, with its floor."""
    floor = draw.floor
    threshold = floor.log_uniform + floor.reference - floor.margin
    weights = floor.weights(base, draw.trajectory.length)
    return start._replace(alpha=floor.alpha, weight=float(weights[-1]) if len(weights) else 0.0, floor=threshold,
                          log_length=-np.inf if floor.length is None else float(np.log(floor.length)))
