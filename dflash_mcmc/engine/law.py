"""A `Law` applied to rows of logits, and the draw by inverse transform: the same code for every row of a batch."""

from __future__ import annotations

import torch

from dflash_mcmc.ops import Law


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Float32 log-probabilities of float32 logits, shape (rows, vocabulary)."""
    return torch.log_softmax(logits, dim=-1)


def process(logits: torch.Tensor, law: Law, seen: torch.Tensor | None) -> torch.Tensor:
    """Log-probabilities of the law.

    Args:
        logits: float32 (rows, vocabulary); -inf where a token can never be drawn.
        law: at temperature 0 a point mass on the most likely token, the smallest id among equals.
        seen: bool (rows, vocabulary), tokens in prompt or generation; needed only for a repetition penalty.

    Returns:
        float32 (rows, vocabulary) with -inf outside the law's support.
    """
    if law.repetition_penalty != 1.0:
        penalised = torch.where(logits > 0, logits / law.repetition_penalty, logits * law.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    if law.temperature == 0.0:
        return torch.full_like(logits, -torch.inf).scatter_(-1, argmax(logits)[:, None], 0.0)
    logits = logits / law.temperature
    if law.top_k and law.top_k < logits.shape[-1]:
        logits = logits.masked_fill(_rank(logits) >= law.top_k, -torch.inf)
    if law.top_p < 1.0:
        values, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        mass = torch.softmax(values, dim=-1).cumsum(dim=-1, dtype=torch.float64)
        beyond = torch.zeros_like(mass, dtype=torch.bool)
        beyond[:, 1:] = mass[:, :-1] >= law.top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    if law.min_p > 0.0:
        log_p = torch.log_softmax(logits, dim=-1)
        floor = log_p.amax(dim=-1, keepdim=True) + torch.log(torch.tensor(law.min_p, dtype=torch.float64)).to(log_p)
        logits = logits.masked_fill(log_p < floor, -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def draw(log_q: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens by inverse transform over token ids.

    Args:
        log_q: float32 (rows, vocabulary), log-probabilities.
        uniforms: float64 (rows,), inside (0, 1).

    Returns:
        int64 (rows,); never a token of probability zero.
    """
    cumulative = log_q.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    point = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point[:, None], right=True)[:, 0]


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, the smallest id among equals: int64 (rows,)."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    best = logits == logits.amax(dim=-1, keepdim=True)
    return torch.where(best, ids, logits.shape[-1]).amin(dim=-1)


def _rank(logits: torch.Tensor) -> torch.Tensor:
    """Rank of each token in its row, 0 the most likely; equals in the order of token ids."""
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    ranks = torch.arange(logits.shape[-1], device=logits.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, ranks)
