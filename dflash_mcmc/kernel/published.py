"""The kernel of the code of arXiv 2510.14901, for comparison. It does not leave p^alpha invariant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.kernel import MetropolisStep, decide, result, stage_horizon, trace_entry
from dflash_mcmc.ops import Chain, Draw, SamplingParams, Score, Steps
from dflash_mcmc.rng import Key
from dflash_mcmc.types import Trajectory, common_prefix

NO_EARLY_REJECTION = "sampler.rule=published compares overlaps, whose bound does not fall"
_ONLY = {"schedule": "published", "cut": "current", "cut_grid": 1}
"""The values of fields of `power_mh` that the published kernel has."""


def check_published(values: Mapping[str, object]) -> None:
    """Checks that fields of `power_mh` have the values of the published kernel. Raises ConfigError."""
    for name, only in _ONLY.items():
        if values[name] != only:
            raise ConfigError(f"sampler.{name}", values[name], f"{only!r} with sampler.rule=published")


class PublishedMH(NamedTuple):
    """Metropolis-Hastings as published: it can only shorten a sequence.

    A proposal is capped at the length of the state, the ratio covers the overlap of both alone and has no length term, and a
    chain ends with the stage in which its answer ends.
    """

    alpha: float
    num_blocks: int
    num_steps: int
    law: SamplingParams
    """The proposal law q."""
    source: str
    """The logits that q is made from."""
    rescore: bool
    """Whether the current suffix is scored again before each proposal."""

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        """One chain; `horizon` is the full length in tokens."""
        path, steps, trace = Trajectory.start(prompt), list[MetropolisStep](), list[dict]()
        for block in range(1, self.num_blocks + 1):
            block_key = key.fold_in("block", block)
            # As many more tokens as the stage is longer than the one before, since steps may have shortened the state.
            more = stage_horizon(block, self.num_blocks, horizon) - stage_horizon(block - 1, self.num_blocks, horizon)
            path = yield Draw(path, path.length + more, self.law, block_key.fold_in("extend"), self.source)
            for step_number in range(1, self.num_steps + 1):
                step = yield from self.step(path, block_key.fold_in("step", step_number))
                trace.append(trace_entry(step, block, step_number, path.length))
                steps.append(step)
                path = step.trajectory
            if path.ended:  # as in the code of the paper, which returns at the first stop id
                break
        return result(path, steps, 0.0, trace)

    def step(self, path: Trajectory, key: Key) -> Steps[MetropolisStep]:
        """One step. Cut, acceptance and tokens use separate uniforms."""
        cut = key.fold_in("cut").integer(path.length)
        log_uniform = key.fold_in("accept").log_uniform()
        along: Trajectory | None = path
        if self.rescore:
            path, along = (yield Score(path.prefix(cut), path.tokens[cut:], self.law, self.source)), None
        proposal = yield Draw(path.prefix(cut), path.length, self.law, key.fold_in("token"), self.source, along)
        return decide(path, proposal, cut, self.log_ratio(path, proposal, cut), log_uniform)

    def log_ratio(self, path: Trajectory, proposal: Trajectory, cut: int) -> float:
        """Log of the published ratio. Tokens that both share after the cut have the same weight and are left out."""
        start, stop = cut + common_prefix(path.tokens[cut:], proposal.tokens[cut:]), min(path.length, proposal.length)
        weights = [float(np.sum(self.alpha * each.log_p[start:stop] - each.log_q[start:stop])) for each in (proposal, path)]
        return weights[0] - weights[1]
