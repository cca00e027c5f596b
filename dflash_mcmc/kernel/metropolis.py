"""Common parts of Metropolis-Hastings samplers: the outcome of a step, the trace and the result of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.types import ChainResult, Trajectory

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
