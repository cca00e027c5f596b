"""The argument by which a model of `transformers` takes its cache, which version 5.24 renamed."""

from __future__ import annotations

from inspect import signature

import torch


def cache_argument(module: torch.nn.Module) -> str:
    """`cache`, or `past_key_values` for a module of an earlier version. The remote code of a checkpoint may be older."""
    return "cache" if "cache" in signature(module.forward).parameters else "past_key_values"
