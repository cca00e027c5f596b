"""Mathematics that Metropolis-Hastings samplers share: decisions, stages, expected costs. `cuts.py` has the cuts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.types import ChainResult, ExpectedCost, Trajectory

ROUNDING = 1e-5
"""Bound on the rounding of a float32 weight, in nats per token and unit of alpha: the margin of exact early rejection."""


def check_blocks(num_blocks: int, length: int) -> None:
    """Checks that each stage is longer than the one before. Raises ConfigError."""
    if num_blocks > length:
        raise ConfigError("sampler.num_blocks", num_blocks, f"at most dataset.max_new_tokens={length}")


def stage_horizon(block: int, num_blocks: int, horizon: int) -> int:
    """The horizon of stage `block` of 1 to `num_blocks`: its share of the full horizon in tokens, rounded down.

    The last stage has the full horizon, whether or not `num_blocks` divides it.
    """
    return block * horizon // num_blocks


class MetropolisStep(NamedTuple):
    """Outcome of one Metropolis-Hastings step."""

    trajectory: Trajectory
    """The next state."""
    cut: int
    proposal_length: int
    log_ratio: float
    """Log of the acceptance ratio; an upper bound for an abandoned proposal."""
    decision: str
    """`accept`, `identical` (accepted, equal to the state), `reject`, or `abandon` (rejected before it was complete)."""

    @property
    def accepted(self) -> bool:
        return self.decision in ("accept", "identical")

    @property
    def moved(self) -> bool:
        return self.decision == "accept"


def decide(path: Trajectory, proposal: Trajectory, cut: int, log_ratio: float, log_uniform: float) -> MetropolisStep:
    """The step that accepts a complete proposal if `log_uniform` is below `log_ratio`, and otherwise stays at `path`."""
    if not log_uniform < log_ratio:  # a ratio that is not a number rejects
        return MetropolisStep(path, cut, proposal.length, log_ratio, "reject")
    decision = "identical" if np.array_equal(proposal.tokens, path.tokens) else "accept"
    return MetropolisStep(proposal, cut, proposal.length, log_ratio, decision)


def trace_entry(step: MetropolisStep, block: int, number: int, length: int) -> dict[str, float | int | str]:
    """The trace entry of a step. `length` refers to the state before the step, and `log_p` to the state after it."""
    return {"block": block, "step": number, "cut": step.cut, "length": length, "proposal_length": step.proposal_length,
            "log_ratio": step.log_ratio, "decision": step.decision, "log_p": float(step.trajectory.log_p.sum())}


def result(trajectory: Trajectory, steps: Sequence[MetropolisStep], law_error: float, trace: Sequence[dict]) -> ChainResult:
    """The result of a chain after its steps."""
    return ChainResult(trajectory, len(steps), sum(step.accepted for step in steps), sum(step.moved for step in steps),
                       sum(step.decision == "abandon" for step in steps), law_error, tuple(trace))


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
