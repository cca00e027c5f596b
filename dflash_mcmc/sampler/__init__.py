"""Samplers: generators of `Draw` and `Score` for one chain. Each states the law that it samples.

What several samplers have is declared here once: `AtTemperature` or `ProposesAt` (alpha and a temperature), `Truncated`,
`Staged`, and `RejectsEarly`. Each is a group of fields with what they mean: the law q, its value in the identity, and the
checks. A sampler inherits the groups that it has, and declares again only what differs. `Redraws` has a chain and its steps.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import numpy as np

from dflash_mcmc.components import Component, Settings, identity, runtime
from dflash_mcmc.errors import ConfigError, note
from dflash_mcmc.kernel import EntropyCuts, MetropolisStep, Move, result, trace_entry
from dflash_mcmc.ops import LARGEST, SMALLEST, Chain, Draw, SamplingParams, Steps
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, ExpectedCost, Trajectory


class Sampler(Component):
    """Base class of samplers. A sampler must define `chain`. If it defines `expected_cost`, its runs have a cost estimate."""

    __slots__ = ()

    group = "sampler"
    is_deterministic: ClassVar[bool] = False
    """Whether every draw takes the most likely token, so that no randomness is used."""
    draws_once: ClassVar[bool] = False
    """Whether a chain is one draw from `law()`. Its log q is then its log probability and gives an importance weight."""
    takes_potential: ClassVar[bool] = False
    """Whether the sampler weighs answers by `Trajectory.weight`, so that a potential is a factor of its target."""

    @abstractmethod
    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        """One chain: a generator that yields operations and returns a ChainResult.

        Args:
            prompt: token ids, int64.
            horizon: longest answer in tokens.
            key: the key of all randomness of the chain.
        """

    def comparing(self, prompt: np.ndarray, horizon: int, key: Key, answer_of: Callable[[np.ndarray], Hashable]) -> Chain:
        """As `chain`, for a sampler that compares the answers of its draws.

        Args:
            answer_of: the answer in token ids, int64; None for a text without one.
        """
        return self.chain(prompt, horizon, key)

    def law(self) -> SamplingParams:
        """Sampling parameters of the draws, or of the proposals of a Metropolis-Hastings sampler."""
        return SamplingParams()

    def source(self) -> str:
        """The logits that tokens are drawn from: `blended`, `base` or `draft`."""
        return "blended"

    def power(self) -> float | None:
        """Alpha, if the law tends to p^alpha of whole sequences as the number of steps grows; None for other laws.

        A report compares the samples of runs with the same power.
        """
        return None

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost | None:
        """Mean cost of a chain whose answers have `length` tokens; None if it is not known before the run."""
        return None

    def remarks(self) -> list[str]:
        """What a plan says of the fields."""
        return []

    def width(self) -> int:
        """The largest number of operations that a chain asks for together."""
        return 1

    def rejects_early(self) -> bool:
        """Whether a proposal may be abandoned before it is complete."""
        return False

    def reads_rows(self) -> bool:
        """Whether operations ask for more than log p and log q of tokens: entropies, further laws, or kept sets."""
        return False


@dataclass(kw_only=True)
class AtTemperature(Sampler):
    """Fields: the power of the target, and the temperature at which tokens are drawn."""

    __slots__ = ()  # the fields are slots of the leaf: a class can inherit several groups only if none has slots

    alpha: float = identity(4.0, "power of the target p^alpha", ge=SMALLEST, le=LARGEST)
    temperature: float | None = identity(None, "temperature of the draws; null takes 1/alpha", ge=SMALLEST, le=LARGEST,
                                         inverse_of="alpha", at_zero="sampler=greedy")

    def canonical(self, config: Settings) -> dict[str, object]:
        """The temperature in effect, given or 1/alpha."""
        return {"temperature": self.law().temperature}

    def law(self) -> SamplingParams:
        return SamplingParams(1.0 / self.alpha if self.temperature is None else self.temperature)


@dataclass(kw_only=True)
class ProposesAt(Sampler):
    """Fields: the power of the target, and the temperature of proposals."""

    __slots__ = ()

    alpha: float = identity(4.0, "power of the target p^alpha", ge=SMALLEST, le=LARGEST)
    proposal_temperature: float | None = identity(None, "temperature of the proposal q; null takes 1/alpha", ge=SMALLEST,
                                                  le=LARGEST, inverse_of="alpha")

    def canonical(self, config: Settings) -> dict[str, object]:
        return {"proposal_temperature": self._temperature()}

    def law(self) -> SamplingParams:
        """The proposal law q."""
        return SamplingParams(self._temperature())

    def _temperature(self) -> float:
        return 1.0 / self.alpha if self.proposal_temperature is None else self.proposal_temperature


@dataclass(kw_only=True)
class Truncated(Sampler):
    """Fields: which tokens the law q keeps."""

    __slots__ = ()

    top_k: int = identity(0, "draws keep the k most likely tokens; 0 keeps all", ge=0)
    top_p: float = identity(1.0, "draws keep the smallest set with at least this mass; 1 keeps all", gt=0, le=1)

    def law(self) -> SamplingParams:
        return super().law()._replace(top_k=self.top_k, top_p=self.top_p)


@dataclass(kw_only=True)
class Staged(Sampler):
    """Fields: the stages of a chain whose horizon grows, and the steps in each of them."""

    __slots__ = ()

    num_blocks: int = identity(16, "stages of the progressive schedule; at most one for each token of "
                              "dataset.max_new_tokens", ge=1)
    num_steps: int = identity(2, "Metropolis-Hastings steps in each stage", ge=0)

    def resolved(self, config: Settings) -> Self:
        """The sampler with at most one stage for each token of the longest answer."""
        most = config.dataset.max_new_tokens
        if most < self.num_blocks != self.__dataclass_fields__["num_blocks"].default:  # the default is what nobody gave
            stages = f"{most} stage{'s' * (most != 1)}"
            note(f"sampler.num_blocks={self.num_blocks} makes {stages}, one for each of max_new_tokens={most}")
        return replace(self, num_blocks=min(self.num_blocks, most))


@dataclass(kw_only=True)
class RejectsEarly(Staged):
    """Field: whether a proposal is abandoned once it cannot be accepted any more."""

    __slots__ = ()

    early_reject: Literal["auto", "off", "exact"] = runtime(
        "auto", "abandon a proposal once it cannot be accepted any more: exact = the same decisions as off; auto = exact "
        "where it holds, else off")

    takes_potential = True

    @abstractmethod
    def why_not_early(self, unblended: bool) -> str:
        """Why early rejection would change decisions; empty where it does not. `unblended`: the target has no blend."""

    def check(self, config: Settings) -> None:
        """Raises ConfigError for early rejection that would change decisions."""
        if self.early_reject == "exact" and (reason := self.why_not_early(config.blend.is_null)):
            raise ConfigError("sampler.early_reject", "exact", f"auto or off, since {reason}")

    def resolved(self, config: Settings) -> Self:
        """See `Staged.resolved`. In place of auto it has what holds under the blend of the run."""
        kind = self.early_reject
        if kind == "auto":
            kind = "off" if self.why_not_early(config.blend.is_null) else "exact"
        return replace(super().resolved(config), early_reject=kind)

    def rejects_early(self) -> bool:
        """See `Sampler`. Without a configuration there may be a blend, and auto stands for what holds under it."""
        return self.early_reject != "off" and not self.why_not_early(unblended=self.early_reject == "exact")


class Redraws(RejectsEarly):
    """Chains through stages, whose steps choose a cut, draw the suffix again, and take it or stay."""

    __slots__ = ()

    @abstractmethod
    def move(self) -> Move:
        """The power of the target, and where a suffix may start."""

    def why_not_early(self, unblended: bool) -> str:
        return self.move().why_not_early(self.law())

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        """One chain through all stages; `horizon` is the full length in tokens."""
        return (yield from self.staged(prompt, horizon, key, range(1, self.num_blocks + 1)))[0]

    def staged(self, prompt: np.ndarray, horizon: int, key: Key, blocks: Iterable[int], *,
               adaptive: bool = False) -> Steps[tuple[ChainResult, list[MetropolisStep]]]:
        """A chain through the stages with these horizons, and its steps.

        Args:
            blocks: the horizons, in blocks.
            adaptive: only the last stage makes steps once the answer has ended.
        """
        path, steps, trace, move = Trajectory.start(prompt), list[MetropolisStep](), list[dict](), self.move()
        for block in blocks:
            if path.ended and move.stops:
                break
            block_key, reach = key.fold_in("block", block), move.reach(path, block, self.num_blocks, horizon)
            if not path.ended:
                path = yield from self.extend(path, reach, block_key.fold_in("extend"))
            if path.ended and adaptive and block < self.num_blocks:
                continue
            for step_number, step in enumerate((yield from self.stage(path, reach, block_key)), 1):
                trace.append(trace_entry(step, block, step_number, path.length))
                steps.append(step)
                path = step.trajectory
        return result(path, steps, trace), steps

    def extend(self, path: Trajectory, horizon: int, key: Key) -> Steps[Trajectory]:
        """Continues a state to the horizon of a stage."""
        return (yield Draw(path, horizon, self.law(), key, self.source(), entropy=isinstance(self.move().cuts, EntropyCuts)))

    def stage(self, path: Trajectory, horizon: int, key: Key) -> Steps[list[MetropolisStep]]:
        """The steps of a stage. Their number depends on nothing, so that together they leave the law of a step invariant."""
        steps: list[MetropolisStep] = []
        for step_number in range(1, self.num_steps + 1):
            steps.append((yield from self.step(path, horizon, key.fold_in("step", step_number))))
            path = steps[-1].trajectory
        return steps

    def step(self, path: Trajectory, horizon: int, key: Key) -> Steps[MetropolisStep]:
        """One step from a complete state of horizon `horizon`. Cut, acceptance and tokens use separate uniforms."""
        move = self.move()
        cut = move.cuts.draw(path, key.fold_in("cut"))
        log_uniform = key.fold_in("accept").log_uniform()
        floor = move.floor(path, horizon, cut, log_uniform) if self.rejects_early() else None
        proposal = yield Draw(path.prefix(cut), move.longest(path, horizon), self.law(), key.fold_in("token"), self.source(),
                              path, floor, entropy=isinstance(move.cuts, EntropyCuts))
        return move.decide(path, proposal, horizon, cut, log_uniform, floor)
