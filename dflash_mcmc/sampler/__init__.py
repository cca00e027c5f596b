"""Samplers: generators of `Draw` and `Score` for one chain. Each states the law that it samples.

What several samplers have is declared here once: `AtTemperature` or `ProposesAt` (alpha and a temperature), `Truncated`,
`Penalised`, and `Staged`. Each is a group of fields with what they mean: the law q, its value in the identity, and the checks.
A sampler inherits the groups that it has, and declares again only what differs. `Redraws` has a chain and its steps.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np

from dflash_mcmc.errors import note
from dflash_mcmc.fields import identity
from dflash_mcmc.kernel import EntropyCuts, MetropolisStep, Move, result, stage_horizon, trace_entry
from dflash_mcmc.ops import LARGEST, PENALTY, SMALLEST, Chain, Draw, Floor, SamplingParams, Score, Steps
from dflash_mcmc.registry import Component
from dflash_mcmc.rng import Key
from dflash_mcmc.settings import Settings
from dflash_mcmc.types import ChainResult, ExpectedCost, Trajectory


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

    def rescores(self) -> bool:
        """Whether the current suffix is scored again before each proposal."""
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
        return {"proposal_temperature": ProposesAt.law(self).temperature}

    def law(self) -> SamplingParams:
        """The proposal law q."""
        return SamplingParams(1.0 / self.alpha if self.proposal_temperature is None else self.proposal_temperature)


@dataclass(kw_only=True)
class Truncated(Sampler):
    """Fields: which tokens the law q keeps."""

    __slots__ = ()

    top_k: int = identity(0, "draws keep the k most likely tokens; 0 keeps all", ge=0)
    top_p: float = identity(1.0, "draws keep the smallest set with at least this mass; 1 keeps all", gt=0, le=1)

    def law(self) -> SamplingParams:
        return super().law()._replace(top_k=self.top_k, top_p=self.top_p)


@dataclass(kw_only=True)
class Penalised(Truncated):
    """Fields: all parameters of the law q besides its temperature. The target p has no truncation and no penalty."""

    __slots__ = ()

    min_p: float = identity(0.0, "draws keep tokens with at least this share of the top probability; 0 keeps all", ge=0, le=1)
    repetition_penalty: float = identity(1.0, "draws divide the logits of tokens already present by this; 1 is off, as it "
                                         "always is in the target", ge=SMALLEST, le=LARGEST)
    frequency_penalty: float = identity(0.0, "draws subtract this from a token's logit for each time that it is in the answer "
                                        "so far; 0 is off, as it always is in the target", ge=-PENALTY, le=PENALTY)
    presence_penalty: float = identity(0.0, "draws subtract this from the logits of tokens that are in the answer so far; 0 "
                                       "is off, as it always is in the target", ge=-PENALTY, le=PENALTY)
    penalty_counts: Literal["answer", "prompt+answer"] = identity(
        "answer", "tokens that frequency and presence penalty count: answer = as the OpenAI API and vLLM; prompt+answer = "
        "those of the prompt too")

    def canonical(self, config: Settings) -> dict[str, object]:
        """Leaves out what penalties count where none counts."""
        values = super().canonical(config)
        return values if self.law().counts_tokens else {**values, "penalty_counts": "answer"}

    def law(self) -> SamplingParams:
        return super().law()._replace(min_p=self.min_p, repetition_penalty=self.repetition_penalty,
                                      frequency_penalty=self.frequency_penalty, presence_penalty=self.presence_penalty,
                                      counts_prompt=self.penalty_counts == "prompt+answer" and bool(
                                          self.frequency_penalty or self.presence_penalty))


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
        return dataclasses.replace(self, num_blocks=min(self.num_blocks, most))


class Redraws(Staged):
    """Chains through stages, whose steps choose a cut, draw the suffix again, and take it or stay."""

    __slots__ = ()

    takes_potential = True

    @abstractmethod
    def move(self) -> Move:
        """The power of the target, and where a suffix may start."""

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        """One chain through all stages; `horizon` is the full length in tokens."""
        return (yield from self.staged(prompt, horizon, key, range(1, self.num_blocks + 1)))[0]

    def staged(self, prompt: np.ndarray, horizon: int, key: Key, blocks: Iterable[int], *, adaptive: bool = False,
               returns: bool = False) -> Steps[tuple[ChainResult, list[MetropolisStep]]]:
        """A chain through the stages with these horizons, and its steps.

        Args:
            blocks: the horizons, in blocks.
            adaptive: only the last stage makes steps once the answer has ended.
            returns: the chain ends with the stage in which the answer ends.
        """
        path, steps, trace = Trajectory.start(prompt), list[MetropolisStep](), list[dict]()
        for block in blocks:
            if path.ended and returns:
                break
            block_key, reach = key.fold_in("block", block), self.reach(path, block, horizon)
            if not path.ended:
                path = yield from self.extend(path, reach, block_key.fold_in("extend"))
            if path.ended and adaptive and block < self.num_blocks:
                continue
            for step_number, step in enumerate((yield from self.stage(path, reach, block_key)), 1):
                trace.append(trace_entry(step, block, step_number, path.length))
                steps.append(step)
                path = step.trajectory
        return result(path, steps, 0.0, trace), steps

    def reach(self, path: Trajectory, block: int, horizon: int) -> int:
        """The horizon of stage `block`, in tokens."""
        return stage_horizon(block, self.num_blocks, horizon)

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
        cut = move.cuts.draw(path, horizon, key.fold_in("cut"))
        if cut >= path.length:  # nothing follows the cut, so that the proposal is the state
            return MetropolisStep(path, cut, path.length, 0.0, "identical")
        log_uniform = key.fold_in("accept").log_uniform()
        along: Trajectory | None = path
        floor = self.threshold(path, horizon, cut, log_uniform)
        if self.rescores():
            path, along = (yield Score(path.prefix(cut), path.tokens[cut:], self.law(), self.source())), None
        proposal = yield Draw(path.prefix(cut), horizon, self.law(), key.fold_in("token"), self.source(), along, floor,
                              entropy=isinstance(move.cuts, EntropyCuts))
        return move.decide(path, proposal, horizon, cut, log_uniform, floor)

    def threshold(self, path: Trajectory, horizon: int, cut: int, log_uniform: float) -> Floor | None:
        """The threshold for abandoning a proposal from `cut` on; None if it is never abandoned."""
        return self.move().floor(path, horizon, cut, log_uniform) if self.rejects_early() else None
