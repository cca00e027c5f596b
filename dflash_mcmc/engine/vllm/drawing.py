"""Draws the tokens of a batch from their logits, with the laws of the engine of slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.rows import columns_of_tokens
from dflash_mcmc.engine.vllm.ticket import Ticket
from dflash_mcmc.ops import SamplingParams

_PLAIN = SamplingParams()

PIECE = 2**18
"""Logits that are drawn from together on a CPU, so that all they become stays in its cache."""


class LawGroup(NamedTuple):
    """Rows of the batch that have the same laws.

    Attributes:
        ticket: that of the first row.
        places: the rows, int64 (n,).
        forced: which of them are scores, bool (n,).
    """

    ticket: Ticket
    places: np.ndarray
    forced: np.ndarray


class NextTokens(NamedTuple):
    """What a batch asks for: the next token of each row.

    Attributes:
        uniforms: float64 (rows,).
        forced: int64 (rows,), the tokens of scores; other rows have arbitrary values.
        sequence: gives the tokens before a row's next one, and how many of them are the generation's prompt. Only rows with
            a penalty are asked.
    """

    uniforms: np.ndarray
    forced: np.ndarray
    sequence: Callable[[int], tuple[Sequence[int], int]]


class DrawnBatch(NamedTuple):
    """The tokens of the rows, on the host.

    Attributes:
        tokens: int64 (rows,).
        scores: float64 (rows, 4 + k) as in `ledger.Drawn`, with the largest k of a row.
        finite: bool (rows,), False where logits or processed logits are not finite. The row's other values are then arbitrary.
    """

    tokens: np.ndarray
    scores: np.ndarray
    finite: np.ndarray


def groups_of(tickets: Sequence[Ticket]) -> list[LawGroup]:
    """The rows by their laws."""
    members: dict[tuple, list[int]] = {}
    for place, ticket in enumerate(tickets):
        members.setdefault((ticket.params, ticket.laws, ticket.entropy), []).append(place)
    return [LawGroup(tickets[places[0]], np.array(places), np.array([bool(tickets[place].forced) for place in places]))
            for places in members.values()]


def draw(logits: torch.Tensor, groups: Sequence[LawGroup], asked: NextTokens) -> DrawnBatch:
    """Draws a token for each row, or takes the token that a score forces.

    Args:
        logits: float32 (rows, vocabulary); minus infinity for ids that can never be drawn.
        groups: all rows.
    """
    finite = torch.isfinite(logits.amax(dim=-1))
    if logits.is_cuda or not finite.all():  # a GPU is not waited for
        logits = torch.where(finite[:, None], logits, 0.0)
    parts = [(piece.places, _of_piece(logits, piece, asked)) for group in groups for piece in _pieces(group, logits)]
    width = max(part.shape[1] for _, part in parts)
    values = torch.zeros(len(logits), 1 + width, dtype=torch.float64, device=logits.device)
    values[:, 0] = finite
    for places, part in parts:
        values[places, 1 : 1 + part.shape[1]] = part
    values[:, 0] *= ~values.isnan().any(dim=1)  # processed logits are not finite
    found = values.cpu().numpy()  # one copy from the device for all rows
    return DrawnBatch(found[:, 1].astype(np.int64), found[:, 2:], found[:, 0] > 0)


def _pieces(group: LawGroup, logits: torch.Tensor) -> Iterator[LawGroup]:
    """The group, in pieces on a CPU."""
    count = len(group.places) if logits.device.type != "cpu" else max(1, PIECE // logits.shape[1])
    for first in range(0, len(group.places), count):
        mine = slice(first, first + count)
        yield LawGroup(group.ticket, group.places[mine], group.forced[mine])


def _of_piece(logits: torch.Tensor, piece: LawGroup, asked: NextTokens) -> torch.Tensor:
    """Token and scores of rows with the same laws, float64 (rows, 5 + k)."""
    places, device = piece.places, logits.device
    whole = len(places) == len(logits)
    logits = logits if whole else logits[places[0] : places[-1] + 1] if _is_range(places) else logits[torch.from_numpy(places)]
    ticket, history = piece.ticket, _history(piece, logits, asked)
    target = laws.weigh(logits)
    weights = target if ticket.params == _PLAIN else laws.weigh(laws.process(logits, ticket.params, history))
    tokens, interval = laws.draw(weights, torch.from_numpy(asked.uniforms[places]).to(device))
    if piece.forced.any():
        forced = torch.from_numpy(asked.forced[places]).to(device)
        tokens = torch.where(torch.from_numpy(piece.forced).to(device), forced, tokens)
        interval = laws.intervals(weights, tokens)
    parts = [tokens[:, None].double(), target.log_probability(tokens)[:, None], weights.log_probability(tokens)[:, None],
             interval]
    if ticket.laws or ticket.entropy:
        parts.append(columns_of_tokens(tokens, logits, target, ticket.laws, history))
    return torch.cat(parts, dim=1)


def _is_range(places: np.ndarray) -> bool:
    """Whether sorted places follow one another, so that no copy is needed."""
    return int(places[-1]) - int(places[0]) + 1 == len(places)


def _history(piece: LawGroup, logits: torch.Tensor, asked: NextTokens) -> laws.History:
    """The tokens that penalties read."""
    every = (piece.ticket.params, *piece.ticket.laws)
    if not any(params.has_penalty for params in every):
        return laws.NO_HISTORY
    sequences, seen, counts = [asked.sequence(place) for place in piece.places.tolist()], None, None
    if any(params.repetition_penalty != 1.0 for params in every):
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for row, (tokens, _) in zip(seen, sequences, strict=True):
            row[torch.tensor(tokens, device=logits.device)] = True
    if any(params.counts_tokens for params in every):
        counts = torch.stack([laws.counts_of(np.asarray(tokens[start:]), logits[0]) for tokens, start in sequences])
    return laws.History(seen, counts)
