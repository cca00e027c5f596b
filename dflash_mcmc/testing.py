"""Exact laws: run a sampler with all random choices enumerated, and compare with its stated law.

This module is public, also for samplers outside this package:

    engine = TabularEngine(TabularModel(vocab_size=3, stop_ids=(0,)))
    law = law_of(lambda key: engine.run(sampler.chain(PROMPT, horizon, key)).trajectory)
    target = power_target(engine, horizon, alpha, sampler.law(), sampler.source())
    error = invariance_error(transition_matrix(engine, sampler, horizon, target), target)

The key and the random numbers of a block are choices of an Enumerator. Enumeration replays the program once for every
combination of choices, depth first, and multiplies probabilities. It needs no seed, and no tolerance except for rounding. The
idea is from genlm-control (`tests/conftest.py`, `TraceSWOR`).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.engine.oracle.tabular import TabularEngine
from dflash_mcmc.engine.speculative.rules import Block
from dflash_mcmc.kernel import MetropolisStep
from dflash_mcmc.ops import SamplingParams, Score, Steps
from dflash_mcmc.types import Trajectory

_ROUNDING = 1e-14
"""Shares of an interval below this value count as rounding errors."""


class Enumerator:
    """Walks the tree of choices: `choose` answers from the current branch, `next_branch` moves on."""

    def __init__(self) -> None:
        self._trail: list[list] = []
        self._depth, self.probability = 0, 1.0
        self._used, self._drawn = set[tuple](), set[tuple]()
        self._uniforms: dict[tuple, UnknownUniform] = {}

    def choose(self, probabilities: Sequence[float] | np.ndarray) -> int:
        """An index with positive probability. Every such index is chosen in some branch."""
        if self._depth == len(self._trail):
            options = [index for index, p in enumerate(probabilities) if p > 0.0]
            self._trail.append(options)
        index = self._trail[self._depth][0]
        self._depth += 1
        self.probability *= float(probabilities[index])
        return index

    def claim(self, name: tuple) -> None:
        """Marks a key as used. Raises AssertionError for a second use, which would make two choices equal in a real run.

        A draw uses a key by the positions of its tokens, `(*name, "position", number)`. The same key gives no other choice.
        """
        drawn = name[:-2] if name[-2:-1] == ("position",) else None
        if name in self._used or name in self._drawn or drawn in self._used:
            raise AssertionError(f"the random key {name} is used twice")
        self._used.add(name)
        if drawn is not None:
            self._drawn.add(drawn)

    def next_branch(self) -> bool:
        """Moves to the next unexplored branch. Returns False after the last."""
        while self._trail:
            self._trail[-1].pop(0)
            if self._trail[-1]:
                break
            self._trail.pop()
        self._depth, self.probability = 0, 1.0
        for noted in (self._used, self._drawn, self._uniforms):
            noted.clear()
        return bool(self._trail)

    def uniform(self, name: tuple) -> "UnknownUniform":
        """The uniform of a name. It is the same object throughout a branch, and keeps what is known about its value."""
        return self._uniforms.setdefault(name, UnknownUniform(self))


class EnumeratedKey:
    """Replaces `dflash_mcmc.rng.Key`. Its draws are choices of an Enumerator."""

    def __init__(self, enumerator: Enumerator, name: tuple = ()):
        self._enumerator, self._name = enumerator, name

    def fold_in(self, *parts: str | int) -> "EnumeratedKey":
        return EnumeratedKey(self._enumerator, (*self._name, *parts))

    def integer(self, bound: int) -> int:
        self._enumerator.claim(self._name)
        return self._enumerator.choose([1.0 / bound] * bound)

    def categorical(self, probabilities: np.ndarray) -> int:
        self._enumerator.claim(self._name)
        return self._enumerator.choose(probabilities)

    def contest(self, count: int) -> "EnumeratedContest":
        """A choice among `count` contestants."""
        self._enumerator.claim(self._name)
        return EnumeratedContest(self._enumerator)

    def uniform(self) -> float:
        """Raises TypeError: a number has too many values to enumerate."""
        raise TypeError("uniform() and uniforms() have no finite set of outcomes: a sampler that is to be enumerated draws "
                        "with integer() and log_uniform(), and compares the latter with `<`")

    def uniforms(self, start: int, stop: int) -> np.ndarray:
        """Raises TypeError, as `uniform`."""
        return np.array([self.uniform()])

    def log_uniform(self) -> "UnknownLogUniform":
        self._enumerator.claim(self._name)
        return UnknownLogUniform(UnknownUniform(self._enumerator))

    def chance(self, anchor: int, count: int) -> "EnumeratedChance":
        """The random numbers of a block of `count` drafted tokens after generated token number `anchor` - 1."""
        return EnumeratedChance(self._enumerator, self._name, anchor, count)


class UnknownUniform:
    """A uniform known only up to an interval."""

    def __init__(self, enumerator: Enumerator):
        self._enumerator, self._low, self._high = enumerator, 0.0, 1.0

    def below(self, threshold: float) -> bool:
        return self._find([0.0, min(max(threshold, 0.0), 1.0), 1.0]) == 0

    def draw(self, probabilities: np.ndarray) -> int:
        """An index drawn by inverse transform."""
        upto = np.cumsum(probabilities)
        return self._find([0.0, *(upto / upto[-1]).tolist()])

    def _find(self, ends: Sequence[float]) -> int:
        """The index of the interval between these ends that contains the uniform."""
        low, high = self._low, self._high  # numpy is slower for the few ends of a small vocabulary
        inside = [min(max(end, low), high) for end in ends]
        shares = [(after - before) / (high - low) for before, after in itertools.pairwise(inside)]
        index = self._enumerator.choose([share if share > _ROUNDING else 0.0 for share in shares])
        self._low, self._high = inside[index], inside[index + 1]
        return index


@dataclass(frozen=True)
class UnknownLogUniform:
    """The logarithm of an unknown uniform. It supports only `<`."""

    uniform: UnknownUniform

    def __lt__(self, threshold: float) -> bool:
        return self.uniform.below(math.exp(min(threshold, 0.0)))


class EnumeratedContest:
    """Replaces `dflash_mcmc.rng.Contest`, without early rejection."""

    def __init__(self, enumerator: Enumerator):
        self._enumerator = enumerator

    def winner(self, log_weights: np.ndarray) -> int:
        weights = np.exp(log_weights - np.max(log_weights))
        return self._enumerator.choose(weights / weights.sum())


class EnumeratedChance:
    """Replaces `engine.speculative.rules.Uniforms`, for one row."""

    def __init__(self, enumerator: Enumerator, name: tuple, anchor: int, count: int):
        self._enumerator, self._name, self._anchor, self._count = enumerator, name, anchor, count

    def draft(self, weights: laws.Weights, first: int, shared: bool) -> torch.Tensor:
        uniforms = self._position if shared else self._drafting
        return torch.tensor([[uniforms(slot).draw(row) for slot, row in enumerate(_probabilities(weights), first)]])

    def walk(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = [0] * (self._count + 1)
        for slot, row in enumerate(_probabilities(block.target)):
            tokens[slot] = self._position(slot).draw(row)
            if slot < self._count and tokens[slot] != int(block.drafted[0, slot]):
                break
        interval = laws.intervals(block.target, torch.tensor(tokens))
        return torch.tensor([tokens]), interval[None]

    def accepts(self, probability: torch.Tensor, each: bool) -> torch.Tensor:
        answers = [False] * self._count
        for slot in range(self._count):
            answers[slot] = self._accepting(slot).below(float(probability[0, slot]))
            if not (answers[slot] or each):
                break
        return torch.tensor([answers])

    def token(self, weights: laws.Weights, slot: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self._position(int(slot)).draw(_probabilities(weights)[0])])

    def again(self, weights: laws.Weights, slot: torch.Tensor, use: str) -> torch.Tensor:
        uniform = {"draft": self._drafting, "fresh": self._accepting}[use](int(slot))
        return torch.tensor([uniform.draw(_probabilities(weights)[0])])

    def _position(self, slot: int) -> UnknownUniform:
        return self._enumerator.uniform((*self._name, "token", self._anchor + slot))

    def _drafting(self, slot: int) -> UnknownUniform:
        return self._enumerator.uniform((*self._name, "draft", self._anchor, slot))

    def _accepting(self, slot: int) -> UnknownUniform:
        return self._enumerator.uniform((*self._name, "accept", self._anchor, slot))


def law_of(program: Callable[[EnumeratedKey], Trajectory]) -> dict[tuple[int, ...], float]:
    """Exact law of the tokens of the trajectory that `program(key)` returns."""
    return mean_of(lambda key: (program(key), 1.0))


def mean_of(program: Callable[[EnumeratedKey], tuple[Trajectory, float]]) -> dict[tuple[int, ...], float]:
    """For a program that returns a trajectory and a number: the mean of number * 1(trajectory = x), for every x.

    For sequential Monte Carlo with an unbiased estimate of the sum of weights this is the weight of x.
    """
    enumerator = Enumerator()
    mean: dict[tuple[int, ...], float] = {}
    while True:
        trajectory, value = program(EnumeratedKey(enumerator))
        tokens = tuple(trajectory.tokens.tolist())
        mean[tokens] = mean.get(tokens, 0.0) + enumerator.probability * value
        if not enumerator.next_branch():
            return mean


def _probabilities(weights: laws.Weights) -> np.ndarray:
    """Float64 (rows, vocabulary)."""
    probabilities = (weights.values.flatten(1) / weights.upto[:, -1:])[:, : weights.logits.shape[-1]]
    return probabilities.double().numpy()


class Target(NamedTuple):
    """A law over complete sequences of a horizon. `states`: token tuples; `probability`: float64, sums to 1."""

    states: list[tuple[int, ...]]
    probability: np.ndarray


PROMPT = np.array([0], dtype=np.int64)


def power_target(engine: TabularEngine, horizon: int, alpha: float, params: SamplingParams, source: str) -> Target:
    """p^alpha over the sequences that a stop ends or that are `horizon` long, on the support of `params`."""
    states, weights = [], []
    for tokens in _sequences(engine, horizon):
        trajectory = score(engine, tokens, params, source)
        if np.isfinite(trajectory.log_q).all():
            states.append(tokens)
            weights.append(alpha * trajectory.log_p.sum())
    return Target(states, np.exp(exact_law.log_softmax(np.array(weights))))


def product_target(engine: TabularEngine, horizon: int, params: SamplingParams,
                   source: str = "blended") -> dict[tuple[int, ...], float]:
    """The law of drawing token by token: prod_t q(x_t | x_<t)."""
    probabilities = {}
    for tokens in _sequences(engine, horizon):
        probability = math.exp(score(engine, tokens, params, source).log_q.sum())
        if probability > 0.0:
            probabilities[tokens] = probability
    return probabilities


def score(engine: TabularEngine, tokens: Sequence[int], params: SamplingParams, source: str) -> Trajectory:
    """The trajectory of given tokens after the test prompt, with entropies."""
    with np.errstate(divide="ignore"):
        return engine.answer(Score(Trajectory.start(PROMPT), np.array(tokens, dtype=np.int64), params, source, entropy=True))


class Kernel(Protocol):
    """A sampler with a Markov kernel."""

    def law(self) -> SamplingParams:
        """Sampling parameters of its proposals."""

    def source(self) -> str:
        """The logits that its proposals are drawn from."""

    def step(self, trajectory: Trajectory, horizon: int, key: EnumeratedKey, /) -> Steps[MetropolisStep]:
        """One step."""


def transition_matrix(engine: TabularEngine, sampler: Kernel, horizon: int, target: Target) -> np.ndarray:
    """K[i, j]: probability that `sampler.step` takes state i to state j, float64, rows sum to 1."""
    index = {tokens: row for row, tokens in enumerate(target.states)}
    matrix = np.zeros((len(index), len(index)))
    for tokens, row in index.items():
        trajectory = score(engine, tokens, sampler.law(), sampler.source())
        for reached, probability in _law_of_a_step(engine, sampler, horizon, trajectory).items():
            if reached not in index:
                raise AssertionError(f"a step leads from {tokens} to {reached}, which is no complete sequence")
            matrix[row, index[reached]] += probability
    return matrix


def _law_of_a_step(engine: TabularEngine, sampler: Kernel, horizon: int, state: Trajectory) -> dict[tuple[int, ...], float]:
    return law_of(lambda key: engine.run(sampler.step(state, horizon, key)).trajectory)


def invariance_error(matrix: np.ndarray, target: Target) -> float:
    """Total variation between pi K and pi."""
    return 0.5 * float(np.abs(target.probability @ matrix - target.probability).sum())


def balance_error(matrix: np.ndarray, target: Target) -> float:
    """Largest violation of detailed balance, |pi_i K_ij - pi_j K_ji|."""
    flow = target.probability[:, None] * matrix
    return float(np.abs(flow - flow.T).max())


def total_variation(law: dict, other: dict) -> float:
    """Half the sum of absolute differences of two laws."""
    return 0.5 * sum(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law.keys() | other.keys())


def _sequences(engine: TabularEngine, horizon: int) -> list[tuple[int, ...]]:
    """All complete sequences: those that a stop ends at their last token and not before, and full-length ones without."""
    ends, vocabulary = engine.model.ends, range(engine.model.vocab_size)
    return [tokens for length in range(1, horizon + 1) for tokens in itertools.product(vocabulary, repeat=length)
            if not any(ends(tokens[:shorter]) for shorter in range(1, length)) and (ends(tokens) or length == horizon)]
