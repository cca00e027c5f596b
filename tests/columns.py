"""Checks that `Probe.meanings` describes what a probe writes, and nothing else."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dflash_mcmc.probe import Summary
from dflash_mcmc.registry import components

_OF_EVERY_PROBE = {"condition", "probe", "num_units", "num_units_failed", "tables"}


def assert_described(probe: str, *runs: Path | Summary, absent: Iterable[str] = ()) -> None:
    """Expects that every value, table and column of the runs has a meaning, and that every meaning is of one of them.

    Args:
        runs: folders of finished runs, or summaries.
        absent: names `table` or `table.column` that these runs need not have.
    """
    meanings = components("probe")[probe].cls.meanings
    found: dict[str, set[str]] = {}
    for run in runs:
        for table, names in _of_folder(run) if isinstance(run, Path) else _of_summary(run):
            found.setdefault(table, set()).update(names)
    assert not {name for name in found if name not in meanings}
    unknown, used = set(), set()
    for table, names in found.items():
        for name in _without_ends(names):
            fitting = [name] if name in meanings[table] else [
                column for column in meanings[table] if re.fullmatch(_pattern(column), name)]
            used |= {f"{table}.{column}" for column in fitting}
            unknown |= set() if fitting else {f"{table}.{name}"}
    assert not unknown
    left_out = set(absent)
    assert not {f"{table}.{column}" for table, columns in meanings.items() for column in columns
                if table not in left_out and f"{table}.{column}" not in left_out | used}


def _of_folder(run: Path) -> Iterator[tuple[str, Iterable[str]]]:
    summary = json.loads((run / "summary.json").read_text())
    yield "values", summary.keys() - _OF_EVERY_PROBE
    for name, rows in summary["tables"].items():
        yield name, [column for row in rows for column in row]
    for file in run.glob("*.csv"):
        with file.open(newline="") as lines:
            yield file.stem, next(csv.reader(lines), [])


def _of_summary(found: Summary) -> Iterator[tuple[str, Iterable[str]]]:
    yield "values", found.values
    for name, rows in {**found.tables, **found.data}.items():
        yield name, [column for row in rows for column in row]


def _without_ends(names: set[str]) -> set[str]:
    return {name for name in names
            if not any(name.endswith(end) and {f"{name[:-len(end)]}{other}" for other in ("", "_low", "_high")} <= names
                       for end in ("_low", "_high"))}


def _pattern(column: str) -> str:
    return re.sub(r"\\\{[^}]*\\\}", ".*", re.escape(column))
