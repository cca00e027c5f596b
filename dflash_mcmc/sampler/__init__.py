"""Samplers: generators of `Draw` and `Score` for one chain. Each states the law that it samples."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from dflash_mcmc.components import Component
from dflash_mcmc.ops import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from dflash_mcmc.ops import Chain
    from dflash_mcmc.rng import Key
    from dflash_mcmc.types import ExpectedCost


class Sampler(Component):
    """Base class of samplers. A sampler must define `chain`. If it defines `expected_cost`, its runs have a cost estimate."""

    __slots__ = ()

    group = "sampler"
    is_deterministic: ClassVar[bool] = False
    """Whether every draw takes the most likely token, so that no randomness is used."""
    draws_once: ClassVar[bool] = False
    """Whether a chain is one draw from `law()`. Its log q is then its log probability and gives an importance weight."""
    can_rescore: ClassVar[bool] = False
    """Whether the sampler has a field `rescore`: score the current suffix again before each proposal."""

    @abstractmethod
    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        """One chain: a generator that yields operations and returns a ChainResult.

        Args:
            prompt: token ids, int64.
            horizon: longest answer in tokens.
            key: the key of all randomness of the chain.
        """

    def law(self) -> SamplingParams:
        """Sampling parameters of the draws, or of the proposals of a Metropolis-Hastings sampler."""
        return SamplingParams()

    def power(self) -> float | None:
        """Alpha, if the law tends to p^alpha of whole sequences as the number of steps grows; None for other laws.

        A report compares the samples of runs with the same power.
        """
        return None

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost | None:
        """Mean cost of a chain whose answers have `length` tokens; None if it is not known before the run."""
        return None

    def cost_field(self) -> str | None:
        """The whole-number field that scales the cost of an answer, which `budget` chooses; None if no field does.

        It is a field of the sampler, such as `num_steps`; or `num_chains`, if an answer is a vote of several draws.
        """
        return None

    def width(self) -> int:
        """The largest number of operations that a chain asks for together."""
        return 1

    def rejects_early(self) -> bool:
        """Whether a proposal may be abandoned before it is complete."""
        return False

    def rescores(self) -> bool:
        """Whether the current suffix is scored again before each proposal."""
        return False
