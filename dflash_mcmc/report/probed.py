"""The tables of probes, as text and as CSV."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.config.identity import configuration_of, with_names
from dflash_mcmc.report.parts import ReportColumn, ReportTable, text_of
from dflash_mcmc.statistics.intervals import cautions
from dflash_mcmc.store.described import RUN, json_object

_STARTS_OF_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Characters that begin a formula in Excel, LibreOffice or Google Sheets; the last four are their full-width forms."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def overall(folders: Sequence[Path]) -> str:
    """The tables of finished runs. Runs of a probe share its tables; the first columns are the settings that vary."""
    runs: dict[str, list[tuple[dict, dict]]] = {}
    numbers: dict[str, list[int]] = {}
    configs = [configuration_of(folder) for folder in folders]
    identities = with_names([json_object(folder / RUN)["identity"] for folder in folders], configs)
    for folder, identity in zip(folders, identities, strict=True):
        summary = json_object(folder / "summary.json")
        runs.setdefault(summary["probe"], []).append((identity, summary["tables"]))
        numbers.setdefault(summary["probe"], []).append(summary.get("num_problems", 0))
    texts = {name: [_of_probe(name, of_probe), *cautions(numbers[name])] for name, of_probe in runs.items()}
    return "\n\n".join(text for of in texts.values() for text in of)


def _of_probe(probe: str, runs: list[tuple[dict, dict]]) -> str:
    keys = dict.fromkeys(key for identity, _ in runs for key in identity)
    varying = [key for key in keys if len({json.dumps(identity.get(key)) for identity, _ in runs}) > 1]
    texts = []
    for name in dict.fromkeys(name for _, tables in runs for name in tables):
        rows = [{**{_column(key): identity.get(key) for key in varying}, **row}
                for identity, tables in runs for row in tables.get(name, [])]
        texts.append(f"{probe}: {name}\n" + text_of(table_of(name, "", rows)))
    return "\n\n".join(texts)


def table_of(name: str, title: str, rows: list[dict]) -> ReportTable:
    """A table: numbers with four significant digits, an interval after its value."""
    merged = [_with_intervals(row) for row in rows]
    keys = list(dict.fromkeys(key for row in merged for key in row))
    return ReportTable(name, title, [_displayed(key, merged) for key in keys], merged, data=rows)


def _displayed(key: str, rows: list[dict]) -> ReportColumn:
    numeric = all(isinstance(row.get(key), (int, float, type(None), _Interval)) for row in rows)
    return ReportColumn(key.replace("_", " "), lambda row: _cell(row.get(key)), numeric)


class _Interval(NamedTuple):
    value: float | None
    low: float | None
    high: float | None


def _with_intervals(row: dict) -> dict:
    """The row with `x`, `x_low` and `x_high` merged into one value."""
    ends = {f"{key}{end}" for key in row for end in ("_low", "_high") if f"{key}_low" in row}
    return {key: _Interval(value, row[f"{key}_low"], row[f"{key}_high"]) if f"{key}_low" in row else value
            for key, value in row.items() if key not in ends}


def csv_of(rows: Sequence[dict]) -> str:
    """The rows as CSV with all digits; a missing value is an empty cell.

    A spreadsheet takes a text with certain first characters for a formula and evaluates it. An apostrophe goes before such a
    text, which spreadsheets read as "this is a text" (OWASP, CSV injection). Numbers stay as they are.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [keys, *([row.get(key) for key in keys] for row in rows)]
    return "".join(",".join(map(_csv_cell, line)) + "\n" for line in lines)


def _csv_cell(value: object) -> str:
    text = "" if value is None else str(value)
    if isinstance(value, str) and text.startswith(_STARTS_OF_FORMULAS) and not _NUMBER.fullmatch(text):
        text = f"'{text}"
    if any(sign in text for sign in ',"\r\n'):  # Python's csv module does not quote a lone \r
        return '"' + text.replace('"', '""') + '"'
    return text


def _column(key: str) -> str:
    """The column name of an identity key: `temperature` for `probe.temperature`, `model` for `model.content`."""
    group, _, name = key.rpartition(".")
    return group if name == "content" else name


def _cell(value: object, digits: int = 4) -> str:
    if isinstance(value, _Interval):
        numbers = [_cell(end, digits=3) for end in value]
        return numbers[0] + ("" if value.low is None else f" [{numbers[1]}, {numbers[2]}]")
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
