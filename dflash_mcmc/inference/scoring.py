"""Teacher forcing on a slot cache: log-probabilities of given tokens."""

from __future__ import annotations

import numpy as np
import torch

from dflash_mcmc.inference import columns
from dflash_mcmc.inference import logits_processor as laws
from dflash_mcmc.inference.cache import SlotCache
from dflash_mcmc.inference.model_runner import ModelRunner
from dflash_mcmc.inference.slots import chunks
from dflash_mcmc.ops import Score, grid_origin


def scores(runner: ModelRunner, cache: SlotCache, row: int, score: Score,
           sequence: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """(log p, log q, intervals, columns) of the tokens of `score`, read piece by piece.

    Returns None if logits or processed logits are not finite.

    Args:
        cache, row: this row of the cache holds the tokens before the scored ones, except the last of them.
        sequence: int64, the tokens of prompt and trajectory, then the scored tokens.
    """
    # The first logits are at the position before the first scored token.
    origin = grid_origin(runner.blend.restarts_grid(), score.trajectory)
    start, parts = len(sequence) - len(score.tokens) - 1, []
    for first, size in chunks(start, len(sequence) - 1, runner.prefill_chunk):
        logits = runner.logits_at(cache, row, sequence, origin, first, size, {score.source})
        if not all(torch.isfinite(values.amax(dim=-1)).all() for values in logits.values()):
            return None
        parts.append(_piece(logits, score, sequence, first))
        if any(np.isnan(values).any() for values in parts[-1]):  # processed logits are not finite
            return None
    log_p, log_q, interval, further = (np.concatenate(values) for values in zip(*parts, strict=True))
    return log_p, log_q, interval, further


def _piece(logits: dict[str, torch.Tensor], score: Score, sequence: np.ndarray,
                first: int) -> tuple[np.ndarray, ...]:
    """(log p, log q, intervals, columns) of the tokens after the positions from `first` on. Each token has its own history."""
    values = logits[score.source]
    targets = torch.from_numpy(sequence[first + 1 : first + 1 + len(values)]).to(values.device)
    history = _history(values, score, sequence, first)
    weights, target = laws.weigh(laws.process(values, score.params, history)), laws.weigh(logits["blended"])
    further = values[:, :0].double()
    if columns.width(score):
        further = columns.of_tokens(targets, values, target, score.laws, history)
    return tuple(x.cpu().numpy() for x in (target.log_probability(targets), weights.log_probability(targets),
                                           laws.intervals(weights, targets), further))


def _history(values: torch.Tensor, score: Score, sequence: np.ndarray, first: int) -> laws.History:
    """The tokens that penalties read, for the logits `values` at the positions from `first` on."""
    seen = counts = None
    if any(params.repetition_penalty != 1.0 for params in (score.params, *score.laws)):
        seen = torch.zeros_like(values, dtype=torch.bool)
        for offset in range(len(values)):
            seen[offset, sequence[: first + offset + 1]] = True
    if any(params.counts_tokens for params in (score.params, *score.laws)):
        counts = torch.zeros_like(values)
        counts[0] = laws.counts_of(sequence[len(score.trajectory.prompt) : first + 1], counts[0])
        later = torch.from_numpy(sequence[first + 1 : first + len(values)]).to(values.device)
        counts[1:].scatter_(1, later[:, None], 1.0)
        counts = counts.cumsum(dim=0)
    return laws.History(seen, counts)
