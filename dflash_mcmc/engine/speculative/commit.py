"""Adds several tokens to each row in one step, up to the token that ends the draw."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dflash_mcmc.engine.batching.rows import Rows, Status
from dflash_mcmc.engine.batching.stop_strings import Endings


class Proposal(NamedTuple):
    """Tokens offered to the first rows of the batch, in slots.

    Attributes:
        at: int64 (rows, slots), the positions of the slots.
        first, last: int64 (rows,), the first and the last slot offered.
        tokens: int64 (rows, slots).
        scores: float64 (rows, slots, 4), as in `Rows`.
        bad: bool (rows, slots), where logits were not numbers.
    """

    at: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor
    bad: torch.Tensor
    columns: torch.Tensor | None = None
    """float64 (rows, slots, k), further columns of the tokens (`engine/batching/columns.py`)."""


def commit(state: Rows, offer: Proposal, endings: Endings, floors: bool) -> torch.Tensor:
    """Adds the offered tokens to the live rows, up to the token that ends their draw. Other rows do not change.

    Args:
        endings: finds the tokens that end a draw.
        floors: whether any row has a floor. If not, floors are not checked.

    Returns:
        int64 (rows,), the number of tokens that each row has gained.
    """
    batch, slots = offer.at.shape
    slot = torch.arange(slots, device=offer.at.device)
    live = state.status[:batch] == Status.LIVE
    offered = (slot >= offer.first[:, None]) & (slot <= offer.last[:, None])
    states = endings.states(state, offer.tokens, offered)
    stop = endings.ends(state, offer.tokens, offer.at, states)
    kind = Status.DONE * stop
    if floors:
        weight = _weights(state, offer, offered)
        kind = torch.where(stop, kind, Status.ABANDONED * below_floor(state, offer.at, weight))
    kind = torch.where(offer.bad, Status.FAILED, kind)
    ends = (kind != Status.LIVE) & offered
    ended, at = ends.any(dim=1), ends.long().argmax(dim=1)
    found = torch.where(ended, kind.gather(1, at[:, None])[:, 0], Status.LIVE)
    following = torch.where(ended, at + (found != Status.FAILED), offer.last + 1)
    gained = offered & (slot < following[:, None]) & live[:, None]
    count = gained.sum(dim=1)
    _keep(state, offer, gained)
    if floors:
        last = weight.gather(1, (following - 1).clamp(min=0)[:, None])[:, 0]
        state.weight[:batch] = torch.where(count > 0, last, state.weight[:batch])
    if states is not None:
        after = states.gather(1, (following - 1).clamp(min=0)[:, None])[:, 0]
        state.matched[:batch] = torch.where(count > 0, after, state.matched[:batch])
    state.position[:batch] += count
    state.rounds[:batch] += live
    state.fed[:batch] += live * slots
    state.status[:batch] = torch.where(live, found, state.status[:batch])
    return count


def _keep(state: Rows, offer: Proposal, gained: torch.Tensor) -> None:
    batch = len(gained)
    rows, where = state.ids[:batch, None], torch.where(gained, offer.at, state.nowhere)
    state.tokens[rows, where], state.scores[rows, where] = offer.tokens, offer.scores
    if offer.columns is not None:
        state.columns[rows, where] = offer.columns
    if len(state.seen):
        counts = torch.zeros(batch, state.seen.shape[1], dtype=torch.int32, device=gained.device)
        state.seen[:batch] |= counts.scatter_add_(1, offer.tokens, gained.int()) > 0
    if len(state.counts):
        state.counts[:batch].scatter_add_(1, offer.tokens, gained.to(state.counts.dtype))


def _weights(state: Rows, offer: Proposal, offered: torch.Tensor) -> torch.Tensor:
    """The weight of each row after each slot, float64 (rows, slots)."""
    batch = len(offered)
    gain = state.alpha[:batch, None] * offer.scores[..., 0] - offer.scores[..., 1]
    return state.weight[:batch, None] + torch.where(offered, gain, 0.0).cumsum(dim=1)


def below_floor(state: Rows, at: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Whether the first rows may be abandoned at positions int64 (rows, slots), given weights float64 (rows, slots)."""
    batch = len(at)
    generated, log_length = (at - state.origin[:batch, None] + 1).double(), state.log_length[:batch, None]
    term = torch.where(torch.isfinite(log_length), log_length - generated.log(), 0.0)
    return weight + term <= state.floor[:batch, None]
