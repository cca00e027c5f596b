"""One of N independent draws: the baseline for power sampling at the same cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from dflash_mcmc.fields import identity
from dflash_mcmc.ops import LARGEST, SMALLEST, Chain, Draw, Together
from dflash_mcmc.registry import register
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import AtTemperature, Truncated
from dflash_mcmc.types import ChainResult, ExpectedCost, Trajectory

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config


@register("sampler", "best_of_n")
@dataclass(slots=True, kw_only=True)
class BestOfN(Truncated, AtTemperature):
    """One of N draws: the likeliest, the likeliest per token, or one resampled by the weights of p^alpha.

    Law: candidates y_1 .. y_N are independent draws, token by token, from q = softmax(logits / temperature), truncated by
    top-k and top-p. p is the (blended) target. `log_p` keeps the candidate with the largest log p, and `mean_log_p` the one
    with the largest mean log p over its tokens. Both keep the first of equal candidates. `power` keeps y_i with probability
    proportional to exp(alpha * log p(y_i) - log q(y_i)). This is sampling importance resampling (Rubin 1987). Its law tends
    to p^alpha on the support of q as N grows.
    """

    num_candidates: int = identity(8, "number of draws of a chain; one of them is kept", ge=1, le=65_536)
    select: Literal["log_p", "mean_log_p", "power"] = identity(
        "power", "the draw that is kept: log_p = largest log p; mean_log_p = largest log p per token; power = drawn with "
        "weights exp(alpha * log p - log q)")
    alpha: float = identity(4.0, "power of the target p^alpha of select=power; temperature is 1/alpha unless given",
                            ge=SMALLEST, le=LARGEST)

    def canonical(self, config: Config) -> dict[str, object]:
        """Effective values. A field without effect is not part of the identity."""
        values = AtTemperature.canonical(self, config)
        if self.num_candidates == 1:
            values["select"] = None
        if self.num_candidates == 1 or self.select != "power":
            values["alpha"] = None
        return values

    def width(self) -> int:
        """All candidates are drawn at once."""
        return self.num_candidates

    def cost_field(self) -> str:
        """Draws scale the cost."""
        return "num_candidates"

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost:
        """Mean cost of a chain whose candidates have `length` tokens."""
        return ExpectedCost(self.num_candidates * length, num_draws=self.num_candidates)

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        """Draws the candidates, each of at most `horizon` tokens, and keeps one. The trace has one entry per candidate."""
        candidates = yield Together(tuple(
            Draw(Trajectory.start(prompt), horizon, self.law(), key.fold_in("candidate", index, "token"))
            for index in range(self.num_candidates)))
        kept = self.choose(candidates, key.fold_in("select"))
        trace = [{"candidate": index, "length": path.length, "log_p": float(path.log_p.sum()),
                  "log_q": float(path.log_q.sum()), "decision": "keep" if index == kept else "leave"}
                 for index, path in enumerate(candidates)]
        return ChainResult(candidates[kept], trace=tuple(trace))

    def choose(self, candidates: Sequence[Trajectory], key: Key) -> int:
        """Index of the candidate that is kept."""
        weights = [self.log_weight(path) for path in candidates]
        if self.select != "power":
            return int(np.argmax(weights))
        kept, total = 0, weights[0]
        for index, weight in enumerate(weights[1:], start=1):  # a weighted reservoir of one (Chao 1982)
            total = np.logaddexp(total, weight)
            if key.fold_in(index).log_uniform() < weight - total:
                kept = index
        return kept

    def log_weight(self, path: Trajectory) -> float:
        """Log-weight of a candidate in the choice, in nats."""
        if self.select == "power":
            return float(np.sum(self.alpha * path.log_p - path.log_q))
        return float(path.log_p.sum() if self.select == "log_p" else path.log_p.mean())
