"""Metropolis-Hastings on p^alpha with the draft as proposal: the method that the speculative-MCMC probe examines."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflash_mcmc.components import Need, Settings, identity, register
from dflash_mcmc.draft import check_source
from dflash_mcmc.kernel import MetropolisStep, decide, mh_cost, result, stage_horizon, trace_entry
from dflash_mcmc.ops import LARGEST, SMALLEST, Chain, Draw, SamplingParams, Score, Steps
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import ProposesAt, Staged
from dflash_mcmc.types import ExpectedCost, Trajectory, common_prefix


@register("sampler", "draft_mh")
@dataclass(slots=True, kw_only=True)
class DraftMH(Staged, ProposesAt):
    """Metropolis-Hastings on p^alpha: the draft proposes a new suffix block by block, which is accepted by its weight.

    The target and the schedule are the same as in power_mh. The proposal law q_d is the draft's: softmax(logits /
    draft_temperature). Blocks start at generated tokens 0, B, 2B, ... for every start of a suffix, so log q_d is a function
    of the sequence. The target draws the first token of each block at the same temperature. A whole block is drawn
    and read in one forward of the target. With `proposal=mixture` a suffix comes from the draft with probability
    `draft_weight`, else from the target at `proposal_temperature`, and the ratio uses the density of the mixture.
    """

    draft_temperature: float = identity(1.0, "temperature of the draft's law", ge=SMALLEST, le=LARGEST)
    proposal: Literal["draft", "mixture"] = identity(
        "draft", "draft = the draft alone; mixture = the draft or the target, drawn by weight")
    draft_weight: float = identity(0.5, "share of the draft in the mixture", gt=0, lt=1)

    needs_draft = True
    needs = (Need("decoder.is_null", given="proposal=draft", why=", whose draws are the draft's"),)
    takes_potential = True

    def check(self, config: Settings) -> None:
        check_source(config, "sampler=draft_mh", "sampler.proposal=mixture" if self.proposal == "draft" else "")

    def canonical(self, config: Settings) -> dict[str, object]:
        values = super().canonical(config)
        if self.proposal == "draft":
            values.update(draft_weight=None, proposal_temperature=None)
        return values

    def law(self) -> SamplingParams:
        """The draft's law q_d."""
        return SamplingParams(self.draft_temperature)

    def source(self) -> str:
        return "draft"

    def other_law(self) -> SamplingParams:
        """The law of the mixture's other part, the target."""
        return super().law()

    def power(self) -> float | None:
        return self.alpha

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost:
        """Mean cost of a chain whose answers have `length` tokens. Each proposal is drawn from its cut to its end.

        With the mixture, a token that is drawn from one part is also scored under the other part.
        """
        cost = mh_cost(length, horizon, self.num_blocks, self.num_steps)
        cost = cost._replace(drafts=cost.num_draws)
        if self.proposal == "draft":
            return cost
        return cost._replace(scored=cost.extended + cost.proposed, num_draws=2 * cost.num_draws)

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        path, other, steps, trace = Trajectory.start(prompt), np.empty(0), [], []
        for block in range(1, self.num_blocks + 1):
            block_key, stage = key.fold_in("block", block), stage_horizon(block, self.num_blocks, horizon)
            if not path.ended:
                start = path.length
                path = yield Draw(path, stage, self.law(), block_key.fold_in("extend"), "draft")
                other = np.concatenate([other, (yield from self._other(path, start))])
            for step_number in range(1, self.num_steps + 1):
                step, other = yield from self.transition(path, other, stage, block_key.fold_in("step", step_number))
                trace.append(trace_entry(step, block, step_number, path.length))
                steps.append(step)
                path = step.trajectory
        return result(path, steps, trace)

    def step(self, path: Trajectory, horizon: int, key: Key) -> Steps[MetropolisStep]:
        """One step from a complete state of horizon `horizon`. Scores the state under the mixture's other part first."""
        other = yield from self._other(path, 0)
        step, _ = yield from self.transition(path, other, horizon, key)
        return step

    def transition(self, path: Trajectory, other: np.ndarray, horizon: int,
                   key: Key) -> Steps[tuple[MetropolisStep, np.ndarray]]:
        """One step. `other`, float64 (length,): log-probabilities of the path under the mixture's other part."""
        cut, log_uniform = key.fold_in("cut").integer(path.length), key.fold_in("accept").log_uniform()
        proposal, proposed = yield from self._propose(path, horizon, cut, key)
        proposed = np.concatenate([other[:cut], proposed])
        step = decide(path, proposal, cut, self.log_ratio(path, other, proposal, proposed, cut), log_uniform)
        return step, proposed if step.accepted else other

    def _propose(self, path: Trajectory, horizon: int, cut: int, key: Key) -> Steps[tuple[Trajectory, np.ndarray]]:
        """A proposal with a new suffix from `cut` on, and the suffix's log-probabilities under the other part."""
        start, token_key = path.prefix(cut), key.fold_in("token")
        if self.proposal == "draft":
            proposal = yield Draw(start, horizon, self.law(), token_key, "draft", path)
            return proposal, np.zeros(proposal.length - cut)
        if key.fold_in("part").log_uniform() < math.log(self.draft_weight):
            proposal = yield Draw(start, horizon, self.law(), token_key, "draft")
            return proposal, (yield from self._other(proposal, cut))
        drawn = yield Draw(start, horizon, self.other_law(), token_key, "base")
        proposal = yield Score(start, drawn.tokens[cut:], self.law(), "draft")
        return proposal, drawn.log_q[cut:]

    def _other(self, path: Trajectory, start: int) -> Steps[np.ndarray]:
        """Log-probabilities of tokens from `start` on under the mixture's other part; zeros if it has none."""
        if self.proposal == "draft" or path.length == start:
            return np.zeros(path.length - start)
        scored = yield Score(path.prefix(start), path.tokens[start:], self.other_law(), "base")
        return scored.log_q[start:]

    def log_ratio(self, path: Trajectory, other: np.ndarray, proposal: Trajectory, proposed: np.ndarray, cut: int) -> float:
        """Log of the Metropolis-Hastings ratio of moving from `path` to `proposal`, which share `cut` tokens."""
        start = cut
        if self.proposal == "draft":  # tokens that both share after the cut have the same weight: they are left out
            start += common_prefix(path.tokens[cut:], proposal.tokens[cut:])
        term = math.log(path.length / proposal.length)
        return self.log_weight(proposal, proposed[start:], start) - self.log_weight(path, other[start:], start) + term

    def log_weight(self, path: Trajectory, other: np.ndarray, start: int) -> float:
        """Sum of alpha * log p over tokens from `start` on, minus the log-density of the proposal there."""
        log_q = float(np.sum(path.log_q[start:]))
        if self.proposal == "mixture":
            log_q = float(np.logaddexp(math.log(self.draft_weight) + log_q,
                                       math.log1p(-self.draft_weight) + float(np.sum(other))))
        return self.alpha * float(np.sum(path.log_p[start:])) - log_q + path.evidence
