"""Metropolis-Hastings sampling from the power distribution p^alpha of whole sequences, block by block.

Karan & Du 2025, "Reasoning with Sampling: Your Base Model is Smarter Than You Think" (arXiv 2510.14901). Here the length of a
sequence is part of the state. The published kernel can only shorten sequences, and does not leave p^alpha invariant.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflash_mcmc import kernel
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity
from dflash_mcmc.kernel import EntropyCuts, MetropolisStep, Move, UniformCuts
from dflash_mcmc.ops import Chain, Draw, Score, Steps
from dflash_mcmc.registry import register
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import Penalised, ProposesAt, Redraws, Staged
from dflash_mcmc.settings import Settings
from dflash_mcmc.types import ExpectedCost, Trajectory, common_prefix

_PUBLISHED = {"schedule": "published", "cut": "current"}
"""The values of fields that the published kernel has."""


@register("sampler", "power_mh")
@dataclass(slots=True, kw_only=True)
class PowerMH(Redraws, Penalised, ProposesAt):
    """Metropolis-Hastings on p^alpha: regenerate a random suffix, accept by the weight of the whole suffix.

    Target at stage k, with horizon L_k = floor(k * length / num_blocks): pi_k(x) proportional to prod_t p(x_t | x_<t)^alpha
    over the sequences that end in a stop or are L_k tokens long. If the proposal has top-k, top-p or min-p, pi_k is
    restricted to the tokens that they keep, and p is not renormalised. Each stage extends the state to L_k by the proposal
    law q and makes `num_steps` steps. Each step leaves pi_k invariant: it chooses a cut, draws a new suffix from q up to
    L_k, and accepts with probability min(1, exp(W(y) - W(x) + g)). W sums alpha * log p - log q over the whole suffix.
    g is log|x| - log|y| if the cut was chosen among the places of x, 0 if it was chosen among all places up to the horizon,
    and log S(x) - log S(y) if it was chosen by jumps of the entropy (`kernel/`).

    With `schedule=adaptive` the horizon of a stage is twice that before, and the last stage follows as soon as the answer has
    ended. Every stage before the last is start-up: its steps leave their own pi_k invariant, but how many are made depends on
    the answer. The last stage makes `num_steps` steps at the full horizon, whatever the answer. So it leaves pi_K invariant,
    as the last stage of `schedule=published` does, and the chain's law tends to pi_K as `num_steps` grows.
    """

    schedule: Literal["published", "adaptive"] = identity(
        "published", "stages of a chain: published = all num_blocks stages, also those after the answer has ended; adaptive = "
        "horizons that double from length / num_blocks, and the last stage as soon as the answer has ended")
    cut: Literal["current", "horizon", "entropy"] = identity(
        "current", "where a suffix may start: current = any place of the current sequence, with the length term (law B); "
        "horizon = any place up to the horizon, places past the end change nothing (law A); entropy = more often where the "
        "entropy of p rises")
    entropy_power: float = identity(4.0, "with cut=entropy: the weight of a place is the rise of the entropy there, to this "
                                    "power; 0 gives all rises the same weight", ge=0)
    proposal: Literal["base", "matched"] = identity(
        "base", "logits that proposals are drawn from under a blend: base = without it, as published; matched = with it")
    rule: Literal["exact", "published"] = identity(
        "exact", "exact = the kernel above; published = the kernel of arXiv 2510.14901's code, for comparison: capped at the "
        "current length, overlap only, no length term, ends at the first stop id")
    after_eos: Literal["continue", "return"] = identity(
        "continue", "when a stage ends in a finished sequence: continue = make the steps of all later stages too; return = "
        "end the chain there, as published (rule=published always returns)")
    early_reject: Literal["auto", "off", "exact", "eps"] = identity(
        "auto", "abandon a proposal once it cannot be accepted any more: exact = the same decisions as off; eps = for any "
        "proposal, each decision wrong with probability at most epsilon; auto = exact where it holds, else off")
    epsilon: float = identity(1.0e-5, "chance of a wrong rejection that early_reject=eps allows at each step", gt=0, lt=1)
    rescore: bool = identity(False, "score the current suffix again before each proposal, for blend.grid=cut, under which its "
                             "probability depends on the cut")

    can_rescore = True

    def check(self, config: Settings) -> None:
        if self.rule == "published":
            for name, only in _PUBLISHED.items():
                if getattr(self, name) != only:
                    raise ConfigError(f"sampler.{name}", getattr(self, name), f"{only!r} with sampler.rule=published")
            if not config.potential.is_null:
                raise ConfigError("sampler.rule", "published", "exact with a potential: the published ratio leaves out the "
                                  "end of the longer answer")
            if config.dataset.must_end:
                raise ConfigError("dataset.must_end", True, "false with sampler.rule=published, whose ratio leaves out the "
                                  "end of the longer answer")
        if self.schedule == "adaptive" and self.after_eos == "return":
            raise ConfigError("sampler.after_eos", self.after_eos, "'continue' with sampler.schedule=adaptive, which makes "
                              "the last stage for every answer")
        if self.cut == "entropy" and config.blend.restarts_grid():
            raise ConfigError("sampler.cut", self.cut, "'current' or 'horizon' with blend.grid=cut, under which the entropy "
                              "depends on the cut")
        if self.rescore and not config.blend.restarts_grid():
            raise ConfigError("sampler.rescore", self.rescore, "false without blend.grid=cut, since the probability of a "
                              "suffix then does not depend on the cut")
        reason = self.no_early_rejection(config.blend.is_null)
        if self.early_reject in ("exact", "eps") and reason[self.early_reject]:
            others = "auto, off" + (" or eps" if self.early_reject == "exact" and not reason["eps"] else "")
            raise ConfigError("sampler.early_reject", self.early_reject, f"{others}, since {reason[self.early_reject]}")

    def resolved(self, config: Settings) -> PowerMH:
        staged = Staged.resolved(self, config)
        if self.early_reject != "auto":
            return staged
        reason = self.no_early_rejection(config.blend.is_null)["exact"]
        return dataclasses.replace(staged, early_reject="off" if reason else "exact")

    def no_early_rejection(self, unblended: bool) -> dict[str, str]:
        """Why `exact` and `eps` early rejection do not hold; empty if they hold. `unblended`: the target has no blend."""
        eps = kernel.why_lengths_matter(self.alpha)
        if self.rule == "published":
            eps = "sampler.rule=published compares overlaps, whose bound does not fall"
        if not eps and self.rescore:
            eps = "sampler.rescore=true gives a suffix another weight at each step"
        exact = eps or kernel.why_weights_rise(self.alpha, self.law())
        if not exact and self.proposal == "base" and not unblended:
            exact = "sampler.proposal=base draws without the blend that the target has"
        return {"exact": exact, "eps": eps}

    def canonical(self, config: Settings) -> dict[str, object]:
        values = Penalised.canonical(self, config)
        if self.cut != "entropy":
            values["entropy_power"] = 4.0
        if config.blend.is_null:
            values["proposal"] = None
        if self.rule == "published":
            values["after_eos"] = None
        if self.early_reject != "eps":
            values["early_reject"] = values["epsilon"] = None
        return values

    def rejects_early(self) -> bool:
        if self.early_reject == "auto":  # a configuration resolves it; without one there may be a blend
            return not self.no_early_rejection(unblended=False)["exact"]
        return self.early_reject != "off"

    def rescores(self) -> bool:
        return self.rescore

    def reads_rows(self) -> bool:
        """Cuts at jumps of the entropy need it."""
        return self.cut == "entropy"

    def source(self) -> str:
        return "base" if self.proposal == "base" else "blended"

    def power(self) -> float | None:
        exact = not self.returns() and not self.rescore
        return self.alpha if exact and not self.law().truncates else None

    def returns(self) -> bool:
        """Whether a chain ends with the stage in which its answer ends. Its law is then not that of the last stage."""
        return self.rule == "published" or self.after_eos == "return"

    def cuts(self) -> UniformCuts | EntropyCuts:
        """Where a suffix may start."""
        return EntropyCuts(self.entropy_power) if self.cut == "entropy" else UniformCuts(self.cut == "horizon")

    def move(self) -> Move:
        return Move(self.alpha, self.cuts(), self.epsilon if self.early_reject == "eps" else None)

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost:
        """Mean cost of a chain whose answers have `length` tokens. Each proposal is drawn from its cut to its end."""
        def over(steps: int) -> ExpectedCost:
            if self.schedule == "adaptive":
                return kernel.doubling_cost(length, horizon, self.num_blocks, steps, redrawn)
            return kernel.mh_cost(length, horizon, self.num_blocks, steps, redrawn, self.returns())

        redrawn = self.cuts().mean_redrawn
        cost = over(self.num_steps)
        if not self.rescore:
            return cost
        extended = over(0)  # is not scored; each suffix that a step draws again is
        return cost._replace(scored=cost.proposed, num_draws=2 * cost.num_draws - extended.num_draws)

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        adaptive = self.schedule == "adaptive"
        blocks = kernel.doubling(self.num_blocks) if adaptive else range(1, self.num_blocks + 1)
        outcome, steps = yield from self.staged(prompt, horizon, key, blocks, adaptive=adaptive, returns=self.returns())
        bound = min(1.0, self.epsilon * len(steps)) if self.early_reject == "eps" else 0.0
        return outcome._replace(law_error=bound)

    def reach(self, path: Trajectory, block: int, horizon: int) -> int:
        """The horizon of stage `block`, in tokens. The published one counts from the state, which may be shorter."""
        usual = Redraws.reach(self, path, block, horizon)
        return usual if self.rule == "exact" else path.length + usual - Redraws.reach(self, path, block - 1, horizon)

    def step(self, path: Trajectory, horizon: int, key: Key) -> Steps[MetropolisStep]:
        if self.rule == "published":
            return (yield from self._published_step(path, key))
        return (yield from Redraws.step(self, path, horizon, key))

    def _published_step(self, path: Trajectory, key: Key) -> Steps[MetropolisStep]:
        """A step of the code of arXiv 2510.14901, which does not leave p^alpha invariant and can only shorten a sequence.

        A proposal is capped at the length of the state, and the ratio covers the overlap of both alone.
        """
        cut, law, source = key.fold_in("cut").integer(path.length), self.law(), self.source()
        log_uniform = key.fold_in("accept").log_uniform()
        along: Trajectory | None = path
        if self.rescore:
            path, along = (yield Score(path.prefix(cut), path.tokens[cut:], law, source)), None
        proposal = yield Draw(path.prefix(cut), path.length, law, key.fold_in("token"), source, along)
        # Tokens that both share after the cut have the same weight and are left out.
        start, stop = cut + common_prefix(path.tokens[cut:], proposal.tokens[cut:]), min(path.length, proposal.length)
        log_ratio = proposal.prefix(stop).weight(self.alpha, start) - path.prefix(stop).weight(self.alpha, start)
        return kernel.decide(path, proposal, cut, log_ratio, log_uniform)
