"""The kernel of the code of arXiv 2510.14901, for comparison. It does not leave p^alpha invariant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.kernel import MetropolisStep, decide, result, stage_horizon, trace_entry
from dflash_mcmc.ops import Chain, Draw, Score, Steps
from dflash_mcmc.rng import Key
from dflash_mcmc.types import Trajectory, common_prefix

if TYPE_CHECKING:
    from dflash_mcmc.sampler.power_mh import PowerMH

NO_EARLY_REJECTION = "sampler.rule=published compares overlaps, whose bound does not fall"
_ONLY = {"schedule": "published", "cut": "current", "cut_grid": 1}
"""The values of fields of `power_mh` that the published kernel has."""


def check_published(values: Mapping[str, object]) -> None:
    """Checks that fields of `power_mh` have the values of the published kernel. Raises ConfigError."""
    for name, only in _ONLY.items():
        if values[name] != only:
            raise ConfigError(f"sampler.{name}", values[name], f"{only!r} with sampler.rule=published")


def chain(sampler: PowerMH, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
    """One chain of Metropolis-Hastings as published, which can only shorten a sequence. `horizon` is the full length.

    A proposal is capped at the length of the state, the ratio covers the overlap of both alone and has no length term, and a
    chain ends with the stage in which its answer ends.
    """
    path, steps, trace = Trajectory.start(prompt), list[MetropolisStep](), list[dict]()
    for block in range(1, sampler.num_blocks + 1):
        block_key = key.fold_in("block", block)
        # As many more tokens as the stage is longer than the one before, since steps may have shortened the state.
        more = stage_horizon(block, sampler.num_blocks, horizon) - stage_horizon(block - 1, sampler.num_blocks, horizon)
        path = yield Draw(path, path.length + more, sampler.law(), block_key.fold_in("extend"), sampler.source())
        for step_number in range(1, sampler.num_steps + 1):
            made = yield from step(sampler, path, block_key.fold_in("step", step_number))
            trace.append(trace_entry(made, block, step_number, path.length))
            steps.append(made)
            path = made.trajectory
        if path.ended:  # as in the code of the paper, which returns at the first stop id
            break
    return result(path, steps, 0.0, trace)


def step(sampler: PowerMH, path: Trajectory, key: Key) -> Steps[MetropolisStep]:
    """One step. Cut, acceptance and tokens use separate uniforms."""
    cut, law, source = key.fold_in("cut").integer(path.length), sampler.law(), sampler.source()
    log_uniform = key.fold_in("accept").log_uniform()
    along: Trajectory | None = path
    if sampler.rescore:
        path, along = (yield Score(path.prefix(cut), path.tokens[cut:], law, source)), None
    proposal = yield Draw(path.prefix(cut), path.length, law, key.fold_in("token"), source, along)
    return decide(path, proposal, cut, log_ratio(sampler.alpha, path, proposal, cut), log_uniform)


def log_ratio(alpha: float, path: Trajectory, proposal: Trajectory, cut: int) -> float:
    """Log of the published ratio. Tokens that both share after the cut have the same weight and are left out."""
    start, stop = cut + common_prefix(path.tokens[cut:], proposal.tokens[cut:]), min(path.length, proposal.length)
    weights = [float(np.sum(alpha * each.log_p[start:stop] - each.log_q[start:stop])) for each in (proposal, path)]
    return weights[0] - weights[1]
