"""The expected cost of Metropolis-Hastings block by block, in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dflash_mcmc.types import ExpectedCost


def mh_cost(length: float, horizon: int, num_blocks: int, num_steps: int,
            mean_redrawn: Callable[[float, float], float], stops: bool) -> ExpectedCost:
    """The expected cost of a chain on answers of `length` tokens.

    At stage k of K the state has n_k = min(k * horizon / K, length) tokens, and each of its `num_steps` steps draws
    `mean_redrawn(n_k, horizon of the stage)` tokens again: (n_k + 1) / 2 for a cut that is uniform over the state.

    Args:
        stops: whether the chain ends with the stage in which its answer ends.
    """
    block = horizon / num_blocks
    num_stages = min(num_blocks, math.ceil(length / block)) if stops else num_blocks
    states = [(min(stage * block, length), stage * block) for stage in range(1, num_stages + 1)]
    starts = [stage * block for stage in range(min(num_stages, math.ceil(length / block)))]
    return _cost(length, states, starts, num_steps, mean_redrawn)


def doubling(num_blocks: int) -> list[int]:
    """Horizons that double from 1 to `num_blocks`, in blocks."""
    return [2**number for number in range((num_blocks - 1).bit_length())] + [num_blocks]


def doubling_cost(length: float, horizon: int, num_blocks: int, num_steps: int,
                  mean_redrawn: Callable[[float, float], float]) -> ExpectedCost:
    """The expected cost of a chain whose horizons double until its answer of `length` tokens ends.

    The last stage, at the full horizon, follows the extension in which the answer ends. With cuts that are uniform over the
    state, the steps draw at most about 1.5 * num_steps * length tokens, however many blocks there are.
    """
    reaches = [stage * horizon / num_blocks for stage in doubling(num_blocks)]
    passed = [reach for reach in reaches if reach < length]
    return _cost(length, [*((reach, reach) for reach in passed), (length, horizon)], [0.0, *passed], num_steps, mean_redrawn)


def _cost(length: float, states: Sequence[tuple[float, float]], starts: Sequence[float], num_steps: int,
          mean_redrawn: Callable[[float, float], float]) -> ExpectedCost:
    """The cost of stages, given as (length of the state, horizon), and of extensions that start at these lengths."""
    redrawn = [mean_redrawn(state, reach) for state, reach in states]
    prefixes = num_steps * sum(state - part for (state, _), part in zip(states, redrawn, strict=True))
    return ExpectedCost(length, num_steps * sum(redrawn), 0.0, len(starts) + num_steps * len(states), prefixes + sum(starts))
