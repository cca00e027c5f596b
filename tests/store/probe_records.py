"""A record of each probe as it writes them, and ways to damage one at every depth."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tests.store.damage import OTHERS

_SIGNALS = dict.fromkeys((
    "kl_target_draft", "kl_draft_target", "total_variation", "minus_log_acceptance", "draft_entropy", "draft_surprisal",
    "top1_disagreement", "target_entropy", "target_surprisal", "least_confidence"), 0.25)
_CHAINS = {name: [0.5, 0.75] for name in ("acceptance", "moved", "equilibrium", "log_w", "log_w_std", "effective")}
EXAMPLES: dict[str, dict[str, Any]] = {  # a key with a space is free: the name of a setting, a reader, a sampler
    "deep_readout": {
        "prompt_length": 4, "block_size": 3, "block": [0, 0], "p": {"a reader": [0.5, 0.25]}, "rank": {"a reader": [1, 2]},
        "parameters": {**dict.fromkeys(("target_layers", "embedding", "head", "target_other", "draft_fc", "draft_layers",
                                        "draft_norms", "num_target_layers", "num_draft_layers", "hidden_size", "words"), 8),
                       "tied": True, "tapped_layers": [0, 1]}},
    "difficulty": {
        "level": 1, "verdict": "correct", "num_tokens": 9, "num_compared": 6, "mean": _SIGNALS, "max": _SIGNALS},
    "layer_rank": {
        "num_tokens": 2, "num_hard": 1, "vocabulary": 9, "hard": [1], "ranks": {"a row": [1, None]},
        "log_p": {"a row": [-2.5, -1.5]}, "agreements": {"a row": [1, 0]}, "seconds": 0.25},
    "logit_blend": {
        "num_tokens": 2, "num_hard": 1, "seconds": 0.25, "agreement": {"a source": [1.0, 0.5, 0.25]},
        "sums": {"hard": {"a source": [[1.0] * 8, [2.0] * 8]}, "easy": {"a source": [[1.0] * 8, [2.0] * 8]}}},
    "rejection_sampling": {"draws": 4, "accepted": {"a sampler": 2.5}, "counts": {"a sampler": [1, 3]}},
    "sampled_verify": {
        "workload": "agent", "prompt_tokens": 9, "seconds": [0.25],
        "cells": [{"decoder": "plain", "temperature": 0.75, "tokens": [1, 2], "target_forwards": 2, "tool_call": False}]},
    "speculative_mcmc": {
        "num_tokens": 9, "blocks": 2, "block_size": 3, "p": {"kl": [0.5] * 4, "tvd": [0.5] * 4}, "seconds": 0.25,
        "proposals": {"a draft": {"kl": [0.5] * 4, "tvd": [0.5] * 4, "reference": _CHAINS, "joint": _CHAINS}},
        "seconds_target": 0.5, "seconds_draft": 0.25, "timed_rows": 2},
}
OPTIONAL = {"seconds", "seconds_target", "seconds_draft", "timed_rows", "tool_call", "reference", "joint", "a draft.kl",
            "a draft.tvd"}
"""Fields that a record may lack."""
_FREE = {"level": (None, "x", -1), "decoder": ("x",)}
"""Fields of many values, with those of OTHERS that they take."""


class Way(NamedTuple):
    """A damaged record."""

    path: str
    name: str
    record: dict[str, Any]
    noticed: bool | None
    """Whether reading must notice it; None where a record of another run may look like this."""


def ways(record: dict[str, Any], others: tuple = OTHERS) -> list[Way]:
    """Each field at each depth with each other value and without it, and each list without its last value."""
    return [Way(path, name, changed, noticed) for steps, old in fields_of(record)
            for path in [_shown(steps)] for name, changed, noticed in _changed(record, steps, old, others)]


def fields_of(value: Any, steps: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """The steps to each field and to the first value of each list, and what is there."""
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for step, each in inner:
        yield (*steps, step), each
        yield from fields_of(each, (*steps, step))


def _changed(record: dict, steps: tuple, old: Any, others: tuple) -> Iterator[tuple[str, dict, bool | None]]:
    *outer, last = steps
    free = _FREE.get(last, ()) if isinstance(last, str) else ()
    for other in others:
        if not (type(other) is type(old) and other == old):
            good = any(type(other) is type(each) and other == each for each in free)
            yield f"= {other!r:.12}", _with(record, outer, last, other), not good and _is_other(old, other, last)
    if isinstance(last, str):
        changed = _with(record, outer, last, None)
        del at_steps(changed, outer)[last]
        yield "absent", changed, None if " " in last or {last, ".".join(map(str, steps[-2:]))} & OPTIONAL else True
    if isinstance(old, list) and old:
        yield "shorter", _with(record, outer, last, old[:-1]), None


def _is_other(old: Any, other: Any, last: str | int) -> bool | None:
    """Whether a value is of another kind than the one that was there; None where it may be allowed."""
    if isinstance(old, float) and type(other) in (int, float):
        return None
    if old is None or (isinstance(last, int) and other is None):
        return None
    if type(old) is type(other):
        return True if type(old) is int and not 0 <= other < 2**63 else None
    return True


def _with(record: dict, outer: list, last: str | int, value: Any) -> dict:
    changed = json.loads(json.dumps(record))  # no two fields share an object
    at_steps(changed, outer)[last] = value
    return changed


def at_steps(value: Any, steps: Sequence) -> Any:
    for step in steps:
        value = value[step]
    return value


def _shown(steps: tuple) -> str:
    """The path as an error has it."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return text.removeprefix(".")
