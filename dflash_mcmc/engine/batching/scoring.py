"""Teacher forcing on a slot cache: log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from dflash_mcmc.engine.batching import columns
from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.cache import SlotCache
from dflash_mcmc.engine.batching.model_runner import ModelRunner, Span
from dflash_mcmc.engine.batching.slots import chunks
from dflash_mcmc.ops import Score, grid_origin


class ScoreRequest(NamedTuple):
    """A score of a row.

    Attributes:
        row: this row of the cache holds the tokens before the scored ones, except the last of them.
        sequence: int64, the tokens of prompt and trajectory, then the scored tokens.
    """

    row: int
    score: Score
    sequence: np.ndarray

    def span(self) -> Span:
        """The tokens to read. The first logits are at the position before the first scored token."""
        return Span(self.row, self.sequence, len(self.sequence) - len(self.score.tokens) - 1, len(self.sequence) - 1)


Scored: TypeAlias = tuple[np.ndarray, ...]
"""(log p, log q, intervals, columns) of scored tokens."""


def scores(runner: ModelRunner, cache: SlotCache, asked: Sequence[ScoreRequest], most_rows: int) -> list[Scored | None]:
    """The scores of different rows, read piece by piece. Pieces of the same size share a forward.

    None is for a score with logits or processed logits that are not finite.

    Args:
        most_rows: rows of a forward.
    """
    spans = [each.span() for each in asked]
    todo = [list(chunks(span.start, span.stop, runner.prefill_chunk)) for span in spans]
    parts: list[list[Scored] | None] = [[] for _ in asked]
    while waiting := [number for number, left in enumerate(todo) if left and parts[number] is not None]:
        size = todo[waiting[0]][0][1]
        together = [number for number in waiting if todo[number][0][1] == size][:most_rows]
        pieces = [spans[number]._replace(start=todo[number].pop(0)[0]) for number in together]
        hidden, tapped = runner.states(cache, pieces, size), list(runner.tapped)
        for place, (number, piece) in enumerate(zip(together, pieces, strict=True)):
            score, found = asked[number].score, parts[number]
            logits = runner.logits_of(cache, piece, grid_origin(runner.blend.restarts_grid(), score.trajectory), hidden[place],
                                      [state[place] for state in tapped], {score.source})
            part = _piece(logits, score, piece.sequence, piece.start)
            if part is None or found is None:
                parts[number] = None
            else:
                found.append(part)
    return [None if found is None else tuple(np.concatenate(values) for values in zip(*found, strict=True)) for found in parts]


def _piece(logits: dict[str, torch.Tensor], score: Score, sequence: np.ndarray, first: int) -> Scored | None:
    """The scores of the tokens after the positions from `first` on; None if they are not finite. Each has its own history."""
    if not all(torch.isfinite(values.amax(dim=-1)).all() for values in logits.values()):
        return None
    values = logits[score.source]
    targets = torch.from_numpy(sequence[first + 1 : first + 1 + len(values)]).to(values.device)
    history = _history(values, score, sequence, first)
    weights, target = laws.weigh(laws.process(values, score.params, history)), laws.weigh(logits["blended"])
    further = values[:, :0].double()
    if columns.width(score):
        further = columns.of_tokens(targets, values, target, score.laws, history)
    found = tuple(x.cpu().numpy() for x in (target.log_probability(targets), weights.log_probability(targets),
                                            laws.intervals(weights, targets), further))
    return None if any(np.isnan(values).any() for values in found) else found  # processed logits are not finite


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
