"""Greedy decoding: the most likely token of the (blended) target, every time."""

from dataclasses import dataclass

import numpy as np

from dflash_mcmc.components import register, runtime
from dflash_mcmc.ops import LARGEST, SMALLEST, Chain, Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.types import ChainResult, ExpectedCost, Trajectory


@register("sampler", "greedy")
@dataclass(slots=True, kw_only=True)
class Greedy(Sampler):
    """The most likely token, every time: a point mass, the same for every power alpha."""

    alpha: float = runtime(4.0, "has no effect: the argmax is the same at every power; it exists so that a sweep over alpha "
                           "can include this baseline, which then runs once", ge=SMALLEST, le=LARGEST, no_effect=True)

    is_deterministic = True

    def law(self) -> SamplingParams:
        """The most likely token."""
        return SamplingParams(temperature=0.0)

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost:
        return ExpectedCost(length)

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        """One generation of at most `horizon` tokens. Uses no randomness."""
        path = yield Draw(Trajectory.start(prompt), horizon, self.law(), key)
        return ChainResult(path)
