"""Draws the tokens of a batch from their logits, with the laws of the engine of slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.inference import columns
from dflash_mcmc.inference import logits_processor as laws
from dflash_mcmc.inference.vllm.ticket import Ticket
from dflash_mcmc.ops import SamplingParams

_PLAIN = SamplingParams()


class Row(NamedTuple):
    """A row of the batch: the next token of a request."""

    ticket: Ticket
    number: int
    """Number of the token in the request, from 0."""
    uniform: float
    sequence: Sequence[int]
    """The tokens before it, prompt included."""


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


def draw(logits: torch.Tensor, rows: Sequence[Row]) -> DrawnBatch:
    """Draws a token for each row, or takes the token that a score forces.

    Args:
        logits: float32 (rows, vocabulary); minus infinity for ids that can never be drawn.
    """
    finite = torch.isfinite(logits.amax(dim=-1))
    if not finite.all():
        logits = torch.where(finite[:, None], logits, 0.0)
    target = laws.weigh(logits)
    parts = [(members, _of_group(logits, target, [rows[place] for place in members], members))
             for members in _groups(rows).values()]
    width = max(part.shape[1] for _, part in parts)
    values = torch.zeros(len(rows), 1 + width, dtype=torch.float64, device=logits.device)
    values[:, 0] = finite
    for members, part in parts:
        values[members, 1 : 1 + part.shape[1]] = part
    values[:, 0] *= ~values.isnan().any(dim=1)  # processed logits are not finite
    found = values.cpu().numpy()  # one copy from the device for all rows
    return DrawnBatch(found[:, 1].astype(np.int64), found[:, 2:], found[:, 0] > 0)


def _groups(rows: Sequence[Row]) -> dict[tuple, list[int]]:
    """Rows with the same laws, by these laws."""
    groups: dict[tuple, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault((row.ticket.params, row.ticket.laws, row.ticket.entropy), []).append(place)
    return groups


def _of_group(logits: torch.Tensor, target: laws.Weights, rows: Sequence[Row], members: list[int]) -> torch.Tensor:
    """Token and scores of rows with the same laws, float64 (rows, 5 + k)."""
    if len(members) < len(logits):
        index = torch.tensor(members, device=logits.device)
        logits, target = logits[index], laws.Weights(*(values[index] for values in target))
    ticket, history = rows[0].ticket, _history(rows, logits)
    weights = target if ticket.params == _PLAIN else laws.weigh(laws.process(logits, ticket.params, history))
    uniforms = torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=logits.device)
    tokens, interval = laws.draw(weights, uniforms)
    if any(row.ticket.forced for row in rows):
        tokens = torch.tensor([row.ticket.forced[row.number] if row.ticket.forced else token
                               for row, token in zip(rows, tokens.tolist(), strict=True)], device=logits.device)
        interval = laws.intervals(weights, tokens)
    parts = [tokens[:, None].double(), target.log_probability(tokens)[:, None], weights.log_probability(tokens)[:, None],
             interval]
    if ticket.laws or ticket.entropy:
        parts.append(columns.of_tokens(tokens, logits, target, ticket.laws, history))
    return torch.cat(parts, dim=1)


def _history(rows: Sequence[Row], logits: torch.Tensor) -> laws.History:
    """The tokens that penalties read. Rows have the same laws."""
    every = (rows[0].ticket.params, *rows[0].ticket.laws)
    seen = counts = None
    if any(params.repetition_penalty != 1.0 for params in every):
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for place, row in enumerate(rows):
            seen[place, torch.tensor(row.sequence, device=logits.device)] = True
    if any(params.counts_tokens for params in every):
        counts = torch.stack([laws.counts_of(np.asarray(row.sequence[row.ticket.prompt_length :]), logits[0]) for row in rows])
    return laws.History(seen, counts)
