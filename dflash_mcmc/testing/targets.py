"""Stated laws by the sum over all sequences, and the exact transition matrix of a sampler's kernel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.engine.oracle.tabular import TabularEngine
from dflash_mcmc.kernel import MetropolisStep
from dflash_mcmc.ops import SamplingParams, Score, Steps
from dflash_mcmc.testing.enumeration import EnumeratedKey, law_of
from dflash_mcmc.types import Trajectory


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
