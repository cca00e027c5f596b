"""Independence Metropolis-Hastings with given importance weights: what its acceptance is, simulated and in equilibrium.

A chain proposes draws from q and accepts y at x with probability min(1, w(y) / w(x)), w = target / q (Hastings 1970; for the
acceptance in equilibrium Liu 1996, "Metropolized independent sampling").
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Simulated(NamedTuple):
    """Of each row of samples, float64 (rows,)."""

    acceptance: np.ndarray
    """Accepted share of the proposals."""
    moved: np.ndarray
    """Share of the proposals that were accepted and are not the state itself."""


def simulate(log_weights: np.ndarray, uniforms: np.ndarray, tokens: np.ndarray) -> Simulated:
    """A chain through each row of samples: it starts at the first and proposes all others in turn, as the document's did.

    Args:
        log_weights: float64 (rows, samples), nats; samples >= 2.
        uniforms: float64 (rows, samples - 1).
        tokens: int64 (rows, samples, n), what the samples are.
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
    """The acceptance of a chain that has forgotten its start, float64 (rows,), estimated from samples of q.

    E over x ~ target, y ~ q of min(1, w(y) / w(x)) is E over two draws of q of min(w(x), w(y)), divided by E w: over all pairs
    of samples (rows, samples). No chain is run, so that there is no noise of one.
    """
    samples = log_weights.shape[1]
    ordered = np.sort(np.exp(log_weights - log_weights.max(axis=1, keepdims=True)), axis=1)
    # The smaller of a pair is that which stands before the other: the k-th smallest is it in samples - 1 - k pairs.
    pairs = (ordered * np.arange(samples - 1, -1, -1)).sum(axis=1)
    return 2.0 * pairs / ((samples - 1) * ordered.sum(axis=1))


def acceptance_floor(samples: int) -> float:
    """What `simulate` gives, on average, where weights are so uneven that a chain only ever moves to a new largest one.

    The k-th sample is the largest yet with probability 1/k, whatever the weights: (1/2 + ... + 1/samples) / (samples - 1). So
    a simulated acceptance of this height says that there is none.
    """
    return sum(1.0 / k for k in range(2, samples + 1)) / (samples - 1)


def effective_samples(log_weights: np.ndarray) -> np.ndarray:
    """Kong's effective sample size (sum w)² / sum w² of each row, float64 (rows,): 1 to samples."""
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    return weights.sum(axis=1) ** 2 / (weights**2).sum(axis=1)


def chance_of_moves(rate: float, steps: int, least: int) -> float:
    """Chance of at least so many moves in so many steps that each move with probability `rate`, independently."""
    fewer = (math.comb(steps, k) * rate**k * (1.0 - rate) ** (steps - k) for k in range(least))
    return 1.0 - sum(fewer)
