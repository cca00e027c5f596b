"""Blocks chosen by how likely their continuations are under p^alpha: an approximation of the power distribution.

"Scalable power sampling", arXiv 2601.21590 (ICML 2026).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_mcmc import kernel
from dflash_mcmc.components import Settings, identity, register
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.ops import LARGEST, SMALLEST, Chain, Draw, Steps, Together
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import AtTemperature, Truncated
from dflash_mcmc.types import ChainResult, ExpectedCost, Trajectory


@register("sampler", "lookahead")
@dataclass(slots=True, kw_only=True)
class Lookahead(Truncated, AtTemperature):
    """Approximates p^alpha: each block is one of several candidates, chosen by weights from short rollouts.

    The law is not p^alpha, and no number of rollouts makes it p^alpha while they end before the answer does.
    `tests/sampler/test_lookahead.py` states the error on a toy model. For each block, K candidates are drawn from
    q = p^(1/temperature). M rollouts of H tokens follow each candidate. A candidate c has the weight exp(W(c)) times the mean
    of exp(W(rollout)), where W sums alpha * log p - log q. One candidate is drawn in proportion to its weight.

    The paper weighs all likely next tokens, not sampled candidates, and corrects the mean by a jackknife. Its error for
    rollouts that are too short is the same.
    """

    alpha: float = identity(4.0, "power of p^alpha, which the law approximates", ge=SMALLEST, le=LARGEST)
    num_candidates: int = identity(4, "candidates for each block", ge=2, le=1024)
    num_rollouts: int = identity(2, "rollouts after each candidate", ge=1, le=256)
    rollout_length: int = identity(16, "tokens of a rollout; 0 weighs candidates by themselves", ge=0)
    block_size: int = identity(8, "tokens of a block", ge=1)

    def check(self, config: Settings) -> None:
        if self.rollout_length > config.dataset.max_new_tokens:
            raise ConfigError("sampler.rollout_length", self.rollout_length,
                              f"at most dataset.max_new_tokens={config.dataset.max_new_tokens}")

    def canonical(self, config: Settings) -> dict[str, object]:
        return super().canonical(config) | ({} if self.rollout_length else {"num_rollouts": None})

    def width(self) -> int:
        """All rollouts of a block are drawn at once."""
        return self.num_candidates * (self.num_rollouts if self.rollout_length else 1)

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost:
        """Mean cost of a chain whose answers have `length` tokens. Forwards that candidates share are not subtracted."""
        blocks = math.ceil(length / self.block_size)
        rolled = sum(min(self.rollout_length, max(length - block * self.block_size, 0.0)) for block in range(1, blocks + 1))
        drawn = self.num_candidates * (length + self.num_rollouts * rolled)
        return ExpectedCost(drawn, num_draws=blocks * (self.num_candidates + (self.width() if self.rollout_length else 0)))

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        path, sizes = Trajectory.start(prompt), list[float]()
        while not path.complete(horizon):
            block_key, stop = key.fold_in("block", len(sizes)), min(path.length + self.block_size, horizon)
            candidates: Sequence[Trajectory] = yield Together(tuple(
                Draw(path, stop, self.law(), block_key.fold_in("candidate", index))
                for index in range(self.num_candidates)))
            log_weights = np.array([candidate.weight(self.alpha, path.length) for candidate in candidates])
            log_weights += yield from self._ahead(candidates, horizon, block_key)
            sizes.append(kernel.effective_size(log_weights) / self.num_candidates)
            path = candidates[block_key.fold_in("choose").categorical(kernel.shares(log_weights))]
        return ChainResult(path, measures={"candidate_ess": float(np.mean(sizes))})

    def _ahead(self, candidates: Sequence[Trajectory], horizon: int, key: Key) -> Steps[np.ndarray]:
        """Log of the mean weight of each candidate's rollouts, float64 (K,); 0 for a complete candidate."""
        log_means = np.zeros(len(candidates))
        if not self.rollout_length:
            return log_means
        rolled = [(index, rollout) for index, candidate in enumerate(candidates) if not candidate.complete(horizon)
                  for rollout in range(self.num_rollouts)]
        drawn = yield Together(tuple(
            Draw(candidates[index], min(candidates[index].length + self.rollout_length, horizon), self.law(),
                 key.fold_in("rollout", index, rollout)) for index, rollout in rolled))
        weights: dict[int, list[float]] = {}
        for (index, _), rollout in zip(rolled, drawn, strict=True):
            weights.setdefault(index, []).append(rollout.weight(self.alpha, candidates[index].length))
        for index, log_weights in weights.items():
            log_means[index] = kernel.log_mean(np.array(log_weights))
        return log_means
