"""Exact laws: run a sampler with every random choice enumerated, and compare with the law it states.

Public, for samplers outside this package too:

    engine = TabularEngine(TabularModel(vocab_size=3, stop_ids=(0,)))
    law = law_of(lambda key: engine.run(sampler.chain(PROMPT, horizon, key)).trajectory)
    target = power_target(engine, horizon, alpha, sampler.law(), sampler.source())
    error = invariance_error(transition_matrix(engine, sampler, horizon, target), target)

Enumeration replays the program once for every combination of choices, depth first, and multiplies probabilities: no
seed, no tolerance beyond rounding. The idea is genlm-control's (`tests/conftest.py`, `TraceSWOR`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine import logits_processor as laws
from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.engine.oracle.tabular import TabularEngine
from dflash_mcmc.engine.speculative.speculation import Block
from dflash_mcmc.ops import SamplingParams, Score
from dflash_mcmc.types import Trajectory

_ROUNDING = 1e-14
"""Shares of an interval below it are rounding."""


class Enumerator:
    """Walks the tree of choices: `choose` answers from the current branch, `next_branch` moves on."""

    def __init__(self) -> None:
        self._trail: list[list] = []
        self._start()

    def _start(self) -> None:
        self._depth, self.probability = 0, 1.0
        self._used: set[tuple] = set()
        self._uniforms: dict[tuple, UnknownUniform] = {}

    def choose(self, probabilities: Sequence[float]) -> int:
        """An index with positive probability; every such index is taken in some branch."""
        if self._depth == len(self._trail):
            options = [index for index, p in enumerate(probabilities) if p > 0.0]
            self._trail.append(options)
        index = self._trail[self._depth][0]
        self._depth += 1
        self.probability *= float(probabilities[index])
        return index

    def claim(self, name: tuple) -> None:
        """Each key may be used once in a branch: using one twice would make two choices equal in a real run."""
        if name in self._used:
            raise AssertionError(f"the random key {name} is used twice")
        self._used.add(name)

    def next_branch(self) -> bool:
        """Moves to the next unexplored branch; False when there is none."""
        while self._trail:
            self._trail[-1].pop(0)
            if self._trail[-1]:
                break
            self._trail.pop()
        self._start()
        return bool(self._trail)

    def uniform(self, name: tuple) -> UnknownUniform:
        """The uniform of a name: in a branch always the same, with what is known of it."""
        return self._uniforms.setdefault(name, UnknownUniform(self))


class EnumeratedKey:
    """Stands in for `dflash_mcmc.rng.Key`: its draws are choices of an Enumerator."""

    def __init__(self, enumerator: Enumerator, name: tuple = ()):
        self._enumerator, self._name = enumerator, name

    def fold_in(self, *parts: str | int) -> EnumeratedKey:
        return EnumeratedKey(self._enumerator, (*self._name, *parts))

    def integer(self, bound: int) -> int:
        self._enumerator.claim(self._name)
        return self._enumerator.choose([1.0 / bound] * bound)

    def categorical(self, probabilities: np.ndarray) -> int:
        self._enumerator.claim(self._name)
        return self._enumerator.choose(probabilities)

    def uniform(self) -> float:
        """Cannot be enumerated: a number has too many values."""
        raise TypeError("uniform() and uniforms() have no finite set of outcomes: a sampler that is to be enumerated draws "
                        "with integer() and log_uniform(), and compares the latter with `<`")

    def uniforms(self, start: int, stop: int) -> np.ndarray:
        """Cannot be enumerated either."""
        return np.array([self.uniform()])

    def log_uniform(self) -> UnknownLogUniform:
        self._enumerator.claim(self._name)
        return UnknownLogUniform(UnknownUniform(self._enumerator))

    def chance(self, anchor: int, count: int) -> EnumeratedChance:
        """The random numbers of a block of `count` drafted tokens behind generated token number `anchor` - 1."""
        return EnumeratedChance(self._enumerator, self._name, anchor, count)


class UnknownUniform:
    """A uniform of which only is known in which interval it lies."""

    def __init__(self, enumerator: Enumerator):
        self._enumerator, self._low, self._high = enumerator, 0.0, 1.0

    def below(self, threshold: float) -> bool:
        return self._find([0.0, min(max(threshold, 0.0), 1.0), 1.0]) == 0

    def draw(self, probabilities: np.ndarray) -> int:
        """By inverse transform."""
        upto = np.cumsum(probabilities)
        return self._find([0.0, *(upto / upto[-1])])

    def _find(self, ends: Sequence[float]) -> int:
        """Which of the intervals between these ends it lies in."""
        inside = np.clip(ends, self._low, self._high)
        shares = np.diff(inside) / (self._high - self._low)
        index = self._enumerator.choose(np.where(shares > _ROUNDING, shares, 0.0))
        self._low, self._high = float(inside[index]), float(inside[index + 1])
        return index


class UnknownLogUniform(NamedTuple):
    """Its logarithm, which can only be compared."""

    uniform: UnknownUniform

    def __lt__(self, threshold: float) -> bool:
        return self.uniform.below(math.exp(min(threshold, 0.0)))


class EnumeratedChance:
    """Stands in for `engine.speculation.Uniforms`, for one row."""

    def __init__(self, enumerator: Enumerator, name: tuple, anchor: int, count: int):
        self._enumerator, self._name, self._anchor, self._count = enumerator, name, anchor, count

    def draft(self, weights: laws.Weights, first: int, shared: bool) -> torch.Tensor:
        uniforms = (self._position if shared else self._drafting)
        return torch.tensor([[uniforms(first + k).draw(row) for k, row in enumerate(_probabilities(weights))]])

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
    """Exact law of the tokens of the path that `program(key)` returns."""
    enumerator, law = Enumerator(), {}
    while True:
        tokens = tuple(program(EnumeratedKey(enumerator)).tokens.tolist())
        law[tokens] = law.get(tokens, 0.0) + enumerator.probability
        if not enumerator.next_branch():
            return law


class Target(NamedTuple):
    """A law over complete sequences of a horizon. `states`: token tuples; `probability`: float64, sums to 1."""

    states: list[tuple[int, ...]]
    probability: np.ndarray


PROMPT = np.array([0], dtype=np.int64)


def power_target(engine: TabularEngine, horizon: int, alpha: float, params: SamplingParams, source: str) -> Target:
    """p^alpha over the sequences that end in a stop id or are `horizon` long, on the support of `law`."""
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
    """The path of given tokens after the test prompt."""
    with np.errstate(divide="ignore"):
        return engine.answer(Score(Trajectory.start(PROMPT), np.array(tokens, dtype=np.int64), params, source))


def transition_matrix(engine: TabularEngine, sampler: object, horizon: int, target: Target) -> np.ndarray:
    """K[i, j]: probability that `sampler.step` takes state i to state j, float64, rows sum to 1.

    The sampler has `step(path, horizon, key)`, a generator that returns an object with a `path`, and `law`, `source`.
    """
    index = {tokens: number for number, tokens in enumerate(target.states)}
    matrix = np.zeros((len(index), len(index)))
    for tokens, row in index.items():
        trajectory = score(engine, tokens, sampler.law(), sampler.source())
        law = law_of(lambda key, trajectory=trajectory: engine.run(sampler.step(trajectory, horizon, key)).trajectory)
        for reached, probability in law.items():
            if reached not in index:
                raise AssertionError(f"a step leads from {tokens} to {reached}, which is no complete sequence")
            matrix[row, index[reached]] += probability
    return matrix


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


def _probabilities(weights: laws.Weights) -> np.ndarray:
    """Float64 (rows, vocabulary)."""
    values = (weights.values.flatten(1) / weights.upto[:, -1:])[:, : weights.logits.shape[-1]]
    return values.double().numpy()


def _sequences(engine: TabularEngine, horizon: int) -> list[tuple[int, ...]]:
    """All complete sequences: those with a stop id at the end and only there, and full-length ones without."""
    stops, vocabulary = set(engine.model.stop_ids), range(engine.model.vocab_size)
    return [
        tokens
        for length in range(1, horizon + 1)
        for tokens in itertools.product(vocabulary, repeat=length)
        if not stops & set(tokens[:-1]) and (tokens[-1] in stops or length == horizon)
    ]
