"""Applies `SamplingParams` to one row in float64, directly by their definition, for the tabular and reference engines."""

from collections.abc import Sequence

import numpy as np
import torch

from dflash_mcmc.ops import SamplingParams


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Float64 log-probabilities, shape (vocabulary,). Raises ValueError if the largest logit is not finite."""
    logits = np.asarray(logits, dtype=np.float64)
    if not np.isfinite(logits.max()):
        raise ValueError("the logits have no finite maximum, so they give no probabilities")
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def process(logits: np.ndarray, params: SamplingParams, prompt: np.ndarray, generated: np.ndarray) -> np.ndarray:
    """Log-probabilities under the parameters, float64 (vocabulary,), with -inf outside the support.

    `prompt` and `generated` are the token ids before this one. A repetition penalty reads both, frequency and presence
    penalty only `generated`, unless the parameters count the prompt.
    """
    if params.function is not None:
        text = np.concatenate([prompt, generated]).astype(np.int64)
        return log_softmax(np.asarray(params.function(torch.tensor(logits, dtype=torch.float32), text)))
    logits = np.array(logits, dtype=np.float64)
    present = np.unique(np.concatenate([prompt, generated]).astype(np.int64))
    chosen = logits[present]
    logits[present] = np.where(chosen > 0, chosen / params.repetition_penalty, chosen * params.repetition_penalty)
    counted = np.concatenate([prompt, generated] if params.counts_prompt else [generated]).astype(np.int64)
    np.subtract.at(logits, counted, params.frequency_penalty)
    logits[np.unique(counted)] -= params.presence_penalty
    if params.temperature == 0.0:
        point_mass = np.full_like(logits, -np.inf)
        point_mass[int(np.argmax(logits))] = 0.0
        return point_mass
    first, last = (1.0, params.temperature) if params.temperature_last else (params.temperature, 1.0)
    logits = logits / first
    most_likely_first = np.argsort(-logits, kind="stable")
    if params.top_n_sigma:
        logits[logits < logits.max() - params.top_n_sigma * logits[np.isfinite(logits)].std()] = -np.inf
    if params.top_k:
        logits[most_likely_first[params.top_k :]] = -np.inf
    if params.typical_p < 1.0:
        log_p = log_softmax(logits)
        _keep(logits, np.argsort(np.abs(log_p + entropy(log_p)), kind="stable"), params.typical_p)
    if params.top_p < 1.0:
        _keep(logits, most_likely_first, params.top_p)
    if params.min_p > 0.0:
        p = np.exp(log_softmax(logits))
        logits[p < params.min_p * p.max()] = -np.inf
    return log_softmax(logits / last)


def _keep(logits: np.ndarray, order: np.ndarray, share: float) -> None:
    """Keeps the smallest set with at least this mass, taken in an order of token ids."""
    mass = np.cumsum(np.exp(log_softmax(logits))[order])
    logits[order[int(np.searchsorted(mass, share)) + 1 :]] = -np.inf


def entropy(log_p: np.ndarray) -> float:
    """The entropy in nats of log-probabilities (vocabulary,)."""
    possible = log_p[np.isfinite(log_p)]
    return -float(np.sum(np.exp(possible) * possible))


def under(laws: Sequence[np.ndarray], token: int) -> np.ndarray:
    """log q and the interval of a token under several laws, each log-probabilities (vocabulary,): float64 (laws, 3)."""
    return np.array([[law[token], *intervals(law)[token]] for law in laws]).reshape(-1, 3)


def kept(law: np.ndarray, most: int) -> np.ndarray:
    """Ids and log-probabilities of the tokens that a law can draw, by id, float64 (most, 2); -1 and -inf fill it up."""
    found, ids = np.full((most, 2), (-1.0, -np.inf)), np.flatnonzero(law > -np.inf)
    found[: len(ids), 0], found[: len(ids), 1] = ids, law[ids]
    return found


def draw(log_q: np.ndarray, uniform: float) -> int:
    """The token whose interval contains `uniform`: inverse transform over token ids."""
    cumulative = np.cumsum(np.exp(log_q))
    point = min(uniform * cumulative[-1], np.nextafter(cumulative[-1], 0.0))
    return int(np.searchsorted(cumulative, point, side="right"))


def intervals(log_q: np.ndarray) -> np.ndarray:
    """The interval of uniforms that `draw` maps to each token: float64 (vocabulary, 2), lower and upper ends."""
    cumulative = np.cumsum(np.exp(log_q))
    return np.stack([np.concatenate([[0.0], cumulative[:-1]]), cumulative], axis=1) / cumulative[-1]
