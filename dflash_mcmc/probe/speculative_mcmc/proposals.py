"""Distances between the law that tokens should have and the law that they are proposed from, and draws from the latter.

p is the target's law of a token, p_alpha = softmax(alpha · logits) that law sharpened, q = softmax(draft logits / T) the
draft's. Everything is over rows of logits, float32 (n, vocabulary), -inf where no token is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Distances(NamedTuple):
    """Of each row, float32 (n,)."""

    kl: torch.Tensor
    """KL(p_alpha || q) in nats."""
    total_variation: torch.Tensor
    """Half the sum of |p_alpha - q|: 1 minus it is the chance that a token drawn from q is kept by rejection sampling."""


class DrawnBlocks(NamedTuple):
    """Tokens drawn from q, (n, samples)."""

    tokens: torch.Tensor
    """int64."""
    log_q: torch.Tensor
    """float64, nats."""


def distances(target: torch.Tensor, draft: torch.Tensor, alpha: float, temperature: float) -> Distances:
    """Between p_alpha of the target's logits and q of the draft's."""
    log_p, log_q = torch.log_softmax(alpha * target, dim=-1), torch.log_softmax(draft / temperature, dim=-1)
    p = log_p.exp()
    # Tokens that neither can give would be 0 · (-inf + inf); what the target gives and the draft cannot is infinite, rightly.
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=-1)
    return Distances(kl.clamp(min=0.0), 0.5 * (p - log_q.exp()).abs().sum(dim=-1))


def draw(logits: torch.Tensor, temperature: float, uniforms: torch.Tensor) -> DrawnBlocks:
    """Draws from each row by inverse transform, never a token of probability zero.

    Args:
        uniforms: float64 (n, samples), inside (0, 1).
    """
    logits = logits / temperature
    weights = (logits - logits.amax(dim=-1, keepdim=True)).double().exp()
    upto = weights.cumsum(dim=-1)
    total = upto[:, -1:]
    # Below the total, where rounding has put it on it: the search then ends at a token with some weight.
    point = torch.minimum(uniforms * total, total * (1.0 - 2.0**-52))
    tokens = torch.searchsorted(upto, point, right=True)
    return DrawnBlocks(tokens, weights.gather(1, tokens).log() - total.log())


def log_probability(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log softmax of tokens int64 (n, samples): float64 of that shape, nats."""
    return logits.gather(1, tokens).double() - torch.logsumexp(logits.double(), dim=-1, keepdim=True)
