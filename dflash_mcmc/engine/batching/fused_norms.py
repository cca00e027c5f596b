"""RMS norms as one operation of PyTorch, with the bits of the five that transformers calls one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import rms_norm

Norm = Callable[[torch.Tensor], torch.Tensor]
_SCALES = (1e-3, 1.0, 1e3)
_COUNTS = (1, 3, 8)


def fused(decoder: torch.nn.Module) -> dict[torch.nn.Module, Norm]:
    """The fused form of each norm of a decoder whose bits it has, by random inputs."""
    found = {module: _norm(module) for module in decoder.modules() if _is_plain(module)}
    return {module: norm for module, norm in found.items() if _agrees(module, norm)}


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether a module looks like the norm of Llama, whose forms in other families have other names or attributes."""
    weight = getattr(module, "weight", None)
    return (type(module).__name__.endswith("RMSNorm") and isinstance(getattr(module, "variance_epsilon", None), float)
            and isinstance(weight, torch.Tensor) and weight.ndim == 1 and weight.dtype == torch.float32)


def _norm(module: Any) -> Norm:
    size, epsilon = list(module.weight.shape), module.variance_epsilon
    return lambda rows: rms_norm(rows, size, module.weight, epsilon)


def _agrees(module: Any, norm: Norm) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = [scale * torch.randn(count, 1, module.weight.numel(), generator=generator)
            for scale in _SCALES for count in _COUNTS]
    return all(torch.equal(norm(each), module(each)) for each in rows)
