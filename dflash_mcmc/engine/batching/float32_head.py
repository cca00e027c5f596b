"""The head of a target: hidden states to logits, with sums in float32.

Logits in bfloat16 would have errors of up to 0.1 nat per token, multiplied by alpha. A product of two bfloat16 numbers is
exact in float32. What matters is therefore the precision of the sums, and not that of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dflash_mcmc.engine.batching import row_linear

_PIECE = 2**19
"""Weights that are converted to float32 at once where the device has no product with float32 sums. They stay in the cache of
a processor, so that a product is as fast as with a copy (notebook, "The engine")."""
_ROW_STEP = 64


def keeps_copy(copied: bool | None, device: torch.device) -> bool:
    """Whether a head keeps a float32 copy of its weights; see `Float32Head`."""
    return device.type == "cpu" if copied is None else copied


def soft_capped(logits: torch.Tensor, cap: float | None, forbidden: torch.Tensor) -> torch.Tensor:
    """cap · tanh(logits / cap), except for forbidden tokens, whose logits stay. The logits themselves without a cap.

    Args:
        forbidden: bool (vocabulary,).
    """
    return logits if cap is None else torch.where(forbidden, logits, cap * (logits / cap).tanh())


class Float32Head:
    """A linear map to logits, with sums in float32.

    Args:
        linear: the head of a model of `transformers`.
        copied: keep a copy of the weights in float32, on a CPU as `row_linear.py` multiplies them. Otherwise the weights stay
            as the checkpoint has them. None means True on a CPU, where a copy is faster, and False on a GPU, where it is not.
            On a GPU, weights in float32 are never copied.

    Attributes:
        weight: (vocabulary, width).
        prepared: the weights of `row_linear.multiply`; None without them.
        bias: float32 (vocabulary,), or None.
        forbidden: bool (vocabulary,), True for tokens whose logit is always -inf.
    """

    def __init__(self, linear: Any, copied: bool | None = None):
        weight = linear.weight.detach()
        copies = keeps_copy(copied, weight.device)
        self.prepared = row_linear.prepared(weight.float()) if copies else None
        self.weight = weight.float() if copies and self.prepared is None else weight
        self.bias: torch.Tensor | None = None if linear.bias is None else linear.bias.detach().float()
        self.forbidden = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits (..., vocabulary) of hidden states (..., width) after the final norm."""
        if self.prepared is not None and not (torch.is_grad_enabled() and hidden.requires_grad):
            return row_linear.multiply(hidden.float(), self.prepared, self.bias)
        if self.weight.dtype == torch.float32:
            return torch.nn.functional.linear(hidden.float(), self.weight, self.bias)
        flat = hidden.flatten(0, -2) if hidden.ndim > 1 else hidden[None]
        logits = self._product(flat).view(*hidden.shape[:-1], -1)
        return logits if self.bias is None else logits + self.bias

    def forbid(self, tokens: Sequence[int]) -> None:
        """Sets the logits of tokens to -inf through the bias, which needs no extra pass over the vocabulary."""
        if not len(tokens):
            return
        self.forbidden[torch.tensor(tokens, device=self.weight.device)] = True
        bias = torch.zeros(len(self.forbidden), device=self.weight.device) if self.bias is None else self.bias
        self.bias = bias.masked_fill(self.forbidden, -torch.inf)

    def _product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 (rows, vocabulary) of hidden states (rows, width), with weights that are not in float32."""
        if hidden.dtype == self.weight.dtype and hidden.device.type == "cuda":
            return torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        exact = hidden.float()
        rows = max(_PIECE // self.weight.shape[1] // _ROW_STEP, 1) * _ROW_STEP
        return torch.cat([exact @ piece.float().t() for piece in self.weight.split(rows)], dim=1)
