"""Independence Metropolis-Hastings with given importance weights: its acceptance, simulated and in equilibrium.

A chain proposes draws from q. In state x it accepts y with probability min(1, w(y) / w(x)), where w = target / q (Hastings
1970; for the acceptance in equilibrium Liu 1996, "Metropolized independent sampling").
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Simulated(NamedTuple):
    """Rates of each row of samples, float64 (rows,)."""

    acceptance: np.ndarray
    """Share of the proposals that were accepted."""
    moved: np.ndarray
    """Share of the proposals that were accepted and differ from the state."""


def simulate(log_weights: np.ndarray, uniforms: np.ndarray, tokens: np.ndarray) -> Simulated:
    """Simulates a chain for each row of samples. It starts at the first sample and proposes the others in order.

    Args:
        log_weights: float64 (rows, samples), nats; samples >= 2.
        uniforms: float64 (rows, samples - 1).
        tokens: int64 (rows, samples, n), the samples themselves.
    """
    rows, samples = log_weights.shape
    log_uniforms, weight, state = np.log(uniforms), log_weights[:, 0], tokens[:, 0]
    accepted, moved = np.zeros(rows), np.zeros(rows)
    for number in range(1, samples):
        proposal = tokens[:, number]
        taken = log_uniforms[:, number - 1] < log_weights[:, number] - weight
        accepted += taken
        moved += taken & (state != proposal).any(axis=1)
        weight, state = np.where(taken, log_weights[:, number], weight), np.where(taken[:, None], proposal, state)
    return Simulated(accepted / (samples - 1), moved / (samples - 1))


def in_equilibrium(log_weights: np.ndarray) -> np.ndarray:
    """The acceptance of a chain in equilibrium, float64 (rows,), estimated from samples of q.

    The expectation of min(1, w(y) / w(x)) over x ~ target and y ~ q equals E[min(w(x), w(y))] / E[w] over x, y ~ q. The
    estimate uses all pairs of samples of a row. It simulates no chain, so it has no simulation noise.
    """
    samples = log_weights.shape[1]
    ordered = np.sort(np.exp(log_weights - log_weights.max(axis=1, keepdims=True)), axis=1)
    # Weights are sorted, so weight number k (from 0) is the minimum in its pairs with the samples - 1 - k later weights.
    pairs = (ordered * np.arange(samples - 1, -1, -1)).sum(axis=1)
    return 2.0 * pairs / ((samples - 1) * ordered.sum(axis=1))


def acceptance_floor(samples: int) -> float:
    """Mean result of `simulate` if the weights are so uneven that a chain only moves to a new maximum.

    The k-th sample is a new maximum with probability 1/k, whatever the weights: (1/2 + ... + 1/samples) / (samples - 1). A
    simulated acceptance of this size therefore means that the chain is stuck.
    """
    return sum(1.0 / k for k in range(2, samples + 1)) / (samples - 1)


def effective_samples(log_weights: np.ndarray) -> np.ndarray:
    """Kong's effective sample size (sum w)² / sum w² of each row, float64 (rows,), from 1 to samples."""
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    return weights.sum(axis=1) ** 2 / (weights**2).sum(axis=1)


def chance_of_moves(rate: float, steps: int, least: int) -> float:
    """Probability of at least `least` moves in `steps` independent steps that each move with probability `rate`."""
    fewer = (math.comb(steps, k) * rate**k * (1.0 - rate) ** (steps - k) for k in range(least))
    return 1.0 - sum(fewer)
