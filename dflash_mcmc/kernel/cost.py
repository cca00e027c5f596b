"""The expected cost of Metropolis-Hastings block by block, in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable

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
    redrawn = [mean_redrawn(state, reach) for state, reach in states]
    num_extensions = min(num_stages, math.ceil(length / block))
    prefixes = num_steps * sum(state - part for (state, _), part in zip(states, redrawn, strict=True))
    return ExpectedCost(length, num_steps * sum(redrawn), 0.0, num_extensions + num_steps * num_stages,
                        prefixes + block * num_extensions * (num_extensions - 1) / 2)
