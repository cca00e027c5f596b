"""Checks the parameters of a rotary embedding. transformers warns about wrong ones, or fills them in, and uses them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_THETAS = ("rope_theta", "rope_local_base_freq", "global_rope_theta", "local_rope_theta", "rotary_emb_base")
_MAPPINGS = ("rope_parameters", "rope_scaling")
_MAY_BE_ZERO = ("mscale", "mscale_all_dim")
_NUMBERS = ("factor", "rope_theta", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor",
            "partial_rotary_factor", "original_max_position_embeddings", *_MAY_BE_ZERO)
_LISTS = ("short_factor", "long_factor")


def wrong_rotation(values: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """(field, value, what is allowed) of the first wrong parameter in the values of a config.json; None if there is none."""
    for name in (name for name in _THETAS if values.get(name) is not None):
        if not _positive(values[name]):
            return name, repr(values[name]), "a number > 0"
    for field in (field for field in _MAPPINGS if values.get(field) is not None):
        given = values[field]
        nested = isinstance(given, Mapping) and any(isinstance(kind, Mapping) for kind in given.values())
        for parameters in (kind for kind in (given.values() if nested else [given]) if kind is not None):
            if not isinstance(parameters, Mapping) or not parameters:
                return field, f"{given!r:.60}", 'parameters, as in {"rope_type": "default", "rope_theta": 10000.0}'
            if wrong := _wrong(parameters):
                return f"{field}.{wrong[0]}", *wrong[1:]
            if field == "rope_parameters" and not any(part.get(name) for part in (parameters, values) for name in _THETAS):
                return f"{field}.rope_theta", "None", "a number > 0"
    return None


def _wrong(parameters: Mapping[str, Any]) -> tuple[str, str, str] | None:
    for name, value in parameters.items():
        if name in _NUMBERS and value is not None and not _positive(value, name in _MAY_BE_ZERO):
            return name, repr(value)[:60], f"a number {'>=' if name in _MAY_BE_ZERO else '>'} 0"
        if name in _LISTS and not (isinstance(value, list) and value and all(map(_positive, value))):
            return name, repr(value)[:60], "a list of numbers > 0"
    return None


def _positive(value: Any, or_zero: bool = False) -> bool:
    return (isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            and (value > 0 or (or_zero and value == 0)))
