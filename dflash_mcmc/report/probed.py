"""The tables of probes, as text and as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate


def overall(folders: Sequence[Path]) -> str:
    """The tables of finished runs. Runs of one probe share them, behind columns of what varies between those runs."""
    runs: dict[str, list[tuple[dict, dict]]] = {}
    for folder in folders:
        summary, run = (json.loads((folder / name).read_text()) for name in ("summary.json", "run.json"))
        runs.setdefault(summary["probe"], []).append((run["identity"], summary["tables"]))
    return "\n\n".join(_of_probe(name, found) for name, found in runs.items())


def _of_probe(probe: str, runs: list[tuple[dict, dict]]) -> str:
    keys = dict.fromkeys(key for identity, _ in runs for key in identity)
    varying = [key for key in keys if len({json.dumps(identity.get(key)) for identity, _ in runs}) > 1]
    texts = []
    for name in dict.fromkeys(name for _, tables in runs for name in tables):
        rows = [{**{_column(key): identity.get(key) for key in varying}, **row}
                for identity, tables in runs for row in tables.get(name, [])]
        texts.append(f"{probe}: {name}\n{text_of(rows)}")
    return "\n\n".join(texts)


def text_of(rows: list[dict]) -> str:
    """A table for a terminal; numbers with four digits that count."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    numbers = [key for key in keys if all(isinstance(row.get(key), (int, float, type(None))) for row in rows)]
    return tabulate([[_cell(row.get(key)) for key in keys] for row in rows], [key.replace("_", " ") for key in keys],
                    tablefmt="github", disable_numparse=True,
                    colalign=["right" if key in numbers else "left" for key in keys])


def csv_of(rows: list[dict]) -> str:
    """The same rows with all digits; empty where there is no value."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _column(key: str) -> str:
    """`temperature` of `probe.temperature`; `model` of `model.content`."""
    group, _, name = key.rpartition(".")
    return group if name == "content" else name


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
