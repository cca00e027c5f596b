"""Metropolis-Hastings sampling from the power distribution p^alpha of whole sequences, block by block.

Karan & Du 2025, "Reasoning with Sampling: Your Base Model is Smarter Than You Think" (arXiv 2510.14901). Here the length of a
sequence is part of the state. The published kernel can only shorten sequences, and does not leave p^alpha invariant.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflash_mcmc import kernel
from dflash_mcmc.components import Need, Settings, identity, register
from dflash_mcmc.ops import Chain
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import ProposesAt, Redraws, Truncated
from dflash_mcmc.types import ExpectedCost

_NO_END = ", whose ratio leaves out the end of the longer answer"


@register("sampler", "power_mh")
@dataclass(slots=True, kw_only=True)
class PowerMH(Redraws, Truncated, ProposesAt):
    """Metropolis-Hastings on p^alpha: regenerate a random suffix, accept by the weight of the whole suffix.

    Target at stage k, with horizon L_k = floor(k * length / num_blocks): pi_k(x) proportional to prod_t p(x_t | x_<t)^alpha
    over the sequences that end in a stop or are L_k tokens long. If the proposal has top-k or top-p, pi_k is
    restricted to the tokens that they keep, and p is not renormalised. Each stage extends the state to L_k by the proposal
    law q and makes `num_steps` steps. Each step leaves pi_k invariant: it chooses a cut, draws a new suffix from q up to
    L_k, and accepts with probability min(1, exp(W(y) - W(x) + g)). W sums alpha * log p - log q over the whole suffix.
    g is log|x| - log|y| if all places of x are equally likely cuts, and log S(x) - log S(y) if the cut was chosen by jumps of
    the entropy (`kernel/`).

    With `schedule=adaptive` the horizon of a stage is twice that before, and the last stage follows as soon as the answer has
    ended. Every stage before the last is start-up: its steps leave their own pi_k invariant, but how many are made depends on
    the answer. The last stage makes `num_steps` steps at the full horizon, whatever the answer. So it leaves pi_K invariant,
    as the last stage of `schedule=published` does, and the chain's law tends to pi_K as `num_steps` grows.
    """

    schedule: Literal["published", "adaptive"] = identity(
        "published", "stages of a chain: published = all num_blocks stages, also those after the answer has ended; adaptive = "
        "horizons that double from length / num_blocks, and the last stage as soon as the answer has ended")
    cut: Literal["current", "entropy"] = identity(
        "current", "where a suffix may start: current = any place of the current sequence; entropy = any place, and more "
        "often where the entropy of p rises")
    entropy_power: float = identity(4.0, "with cut=entropy: the weight of a place is the rise of the entropy there, to this "
                                    "power; 0 gives all rises the same weight", ge=0)
    proposal: Literal["base", "matched"] = identity(
        "base", "logits that proposals are drawn from under a blend: base = without it, as published; matched = with it")
    rule: Literal["exact", "published"] = identity(
        "exact", "exact = the kernel above; published = the kernel of arXiv 2510.14901's code, for comparison: capped at the "
        "current length, overlap only, no length term, ends with the stage in which the answer ends")

    needs = (Need("sampler.schedule", "published", given="rule=published"),
             Need("sampler.cut", "current", given="rule=published"),
             Need("potential.is_null", given="rule=published", why=_NO_END),
             Need("dataset.must_end", False, given="rule=published", why=_NO_END))

    def why_not_early(self, unblended: bool) -> str:
        reason = super().why_not_early(unblended)
        if not reason and self.proposal == "base" and not unblended:
            return "sampler.proposal=base draws without the blend that the target has"
        return reason

    def canonical(self, config: Settings) -> dict[str, object]:
        values = super().canonical(config)
        if self.cut != "entropy":
            values["entropy_power"] = 4.0
        if config.blend.is_null:
            values["proposal"] = None
        return values

    def reads_rows(self) -> bool:
        """Cuts at jumps of the entropy need it."""
        return self.cut == "entropy"

    def source(self) -> str:
        return "base" if self.proposal == "base" else "blended"

    def power(self) -> float | None:
        return self.alpha if self.rule == "exact" and not self.law().truncates else None

    def move(self) -> kernel.Move:
        if self.rule == "published":
            return kernel.PublishedMove(self.alpha)
        cuts = kernel.EntropyCuts(self.entropy_power) if self.cut == "entropy" else kernel.UniformCuts()
        return kernel.Move(self.alpha, cuts)

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost:
        """Mean cost of a chain whose answers have `length` tokens. Each proposal is drawn from its cut to its end.

        Cuts at jumps of the entropy count as uniform ones: the jumps are not known beforehand.
        """
        if self.schedule == "adaptive":
            return kernel.doubling_cost(length, horizon, self.num_blocks, self.num_steps)
        return kernel.mh_cost(length, horizon, self.num_blocks, self.num_steps, self.move().stops)

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        adaptive = self.schedule == "adaptive"
        blocks = kernel.doubling(self.num_blocks) if adaptive else range(1, self.num_blocks + 1)
        return (yield from self.staged(prompt, horizon, key, blocks, adaptive=adaptive))[0]
