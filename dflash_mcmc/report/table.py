"""The table of the guided-power-sampling document (section 4.1), one row a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from dflash_mcmc.errors import UserError

_HEADERS = ("condition", "correct", "total", "accuracy", "95 % interval", "avg tokens", "avg time (s)", "MH accept",
            "moved", "no answer", "token-forwards")
_DRAFTED = "accepted length"
"""Stands last where a run has drafted."""


def overall(folders: Sequence[Path]) -> str:
    """Rows in the order of the folders; what tells runs of one condition apart stands behind its name."""
    summaries = [_read(folder / "summary.json") for folder in folders]
    labels = _labels([s["condition"] for s in summaries], [_read(folder / "run.json")["identity"] for folder in folders])
    pairs = [(label, summary) for label, summary in zip(labels, summaries, strict=True) if summary["num_samples"]]
    rows, headers = [_row(label, summary) for label, summary in pairs], list(_HEADERS)
    if any(summary["accepted_length"] is not None for _, summary in pairs):
        headers.append(_DRAFTED)
        rows = [[*row, _number(summary["accepted_length"], "{:.2f}")] for row, (_, summary) in zip(rows, pairs, strict=True)]
    align = ("left", *["right"] * (len(headers) - 1))
    return tabulate(rows, headers=headers, tablefmt="github", colalign=align, disable_numparse=True)


def _row(label: str, summary: dict) -> list[str]:
    share = f"{100 * summary['accuracy']:.1f} %"
    interval = f"{100 * summary['accuracy_low']:.1f} - {100 * summary['accuracy_high']:.1f}"
    rates = [_number(summary[name], "{:.1%}").replace("%", " %") for name in ("acceptance", "moved_rate")]
    return [label, str(summary["correct"]), str(summary["num_samples"]), share, interval,
            _number(summary["mean_tokens"], "{:.1f}"), _number(summary["mean_seconds"], "{:.2f}"), *rates,
            str(summary["unparsed"] + summary["error"]), f"{summary['token_forwards']:,}"]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _labels(conditions: list[str], identities: list[dict]) -> list[str]:
    labels = []
    for condition, identity in zip(conditions, identities, strict=True):
        same = [other for name, other in zip(conditions, identities, strict=True) if name == condition]
        varying = [key for key in identity if len({json.dumps(other.get(key)) for other in same}) > 1]
        labels.append(" ".join([condition, *(f"{_short(key)}={_short_value(identity.get(key))}" for key in varying)]))
    return labels


def _short(key: str) -> str:
    """`alpha` of `sampler.alpha`; `model` of `model.content`."""
    group, _, name = key.rpartition(".")
    return group if name == "content" else name


def _short_value(value: object) -> str:
    return value[:8] if isinstance(value, str) and len(value) == 32 else str(value)


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path.parent}: no finished run here: {path.name} cannot be read") from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from error
