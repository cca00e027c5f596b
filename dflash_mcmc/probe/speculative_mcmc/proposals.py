"""Distances between the target's and the draft's distribution of a token, and draws from the draft.

p is the target's distribution of a token, and p_alpha = softmax(alpha · logits) is the sharpened one. q = softmax(draft
logits / T) is the draft's distribution. All functions take rows of logits, float32 (n, vocabulary), with -inf for ids without
a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Distances(NamedTuple):
    """Distances for each row, float32 (n,)."""

    kl: torch.Tensor
    """KL(p_alpha || q) in nats."""
    total_variation: torch.Tensor
    """Half the sum of |p_alpha - q|. One minus it is the probability that rejection sampling accepts a token drawn from q."""


class DrawnBlocks(NamedTuple):
    """Tokens drawn from q, (n, samples)."""

    tokens: torch.Tensor
    """int64."""
    log_q: torch.Tensor
    """float64, nats."""


def distances(target: torch.Tensor, draft: torch.Tensor, alpha: float, temperature: float) -> Distances:
    """The distances between p_alpha of the target's logits and q of the draft's logits."""
    log_p, log_q = torch.log_softmax(alpha * target, dim=-1), torch.log_softmax(draft / temperature, dim=-1)
    p = log_p.exp()
    # Tokens of probability 0 in both would give 0 · (-inf + inf). If only q is 0, the KL divergence is rightly infinite.
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=-1)
    return Distances(kl.clamp(min=0.0), 0.5 * (p - log_q.exp()).abs().sum(dim=-1))


def draw(logits: torch.Tensor, temperature: float, uniforms: torch.Tensor) -> DrawnBlocks:
    """Draws from each row by inverse transform. A token of probability zero is never drawn.

    Args:
        uniforms: float64 (n, samples), inside (0, 1).
    """
    logits = logits / temperature
    weights = (logits - logits.amax(dim=-1, keepdim=True)).double().exp()
    upto = weights.cumsum(dim=-1)
    total = upto[:, -1:]
    # Rounding could move the point to the total. It is kept below, so that the search finds a token of positive weight.
    point = torch.minimum(uniforms * total, total * (1.0 - 2.0**-52))
    tokens = torch.searchsorted(upto, point, right=True)
    return DrawnBlocks(tokens, weights.gather(1, tokens).log() - total.log())


def log_probability(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log softmax of tokens int64 (n, samples), as float64 of the same shape, in nats."""
    return logits.gather(1, tokens).double() - torch.logsumexp(logits.double(), dim=-1, keepdim=True)
