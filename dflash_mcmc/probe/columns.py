"""The tables that probes write. A column has its name, its meaning and its computation in one place.

A table has a row for each case: an object that holds what the columns of the row are computed from. The documentation takes
the meanings, and a probe takes the rows, so that no column is without a meaning and no meaning without a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dflash_mcmc.statistics.intervals import IntervalEstimate

ABSENT = object()
"""The value of a column that a row does not have."""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: its name. A part in braces varies; see `Each`.
        meaning: its meaning and unit, for the documentation.
        value: case -> a JSON value, an `IntervalEstimate` (columns `name`, `name_low`, `name_high`), or `ABSENT`.
    """

    name: str
    meaning: str
    value: Callable[..., object]


class Each(NamedTuple):
    """Columns that a row has once for each of several keys. Their values are functions of the case and of the key.

    Attributes:
        keys: case -> the keys by the text that replaces the part of the names in braces.
        columns: the columns for one key; name, meaning and value each.
    """

    keys: Callable[..., Mapping[str, Any]]
    columns: Sequence[tuple[str, str, Callable[..., object]]]


Columns = Sequence[tuple[str, str, Callable[..., object]] | Column | Each]


class Table:
    """A table of a probe, or with the name `values` a part of the values of its summary.

    Args:
        name: its name, which is also the name of its CSV file.
        columns: its columns in their order.
    """

    def __init__(self, name: str, columns: Columns):
        self.name = name
        self._columns = [column if isinstance(column, (Column, Each)) else Column(*column) for column in columns]

    def row(self, *case: Any) -> dict[str, Any]:
        """The row of a case, of one or several objects."""
        row: dict[str, Any] = {}
        for column in self._columns:
            if isinstance(column, Column):
                _add(row, column.name, column.value(*case))
                continue
            for text, key in column.keys(*case).items():
                for name, _, value in column.columns:
                    start, end = name.index("{"), name.rindex("}")
                    _add(row, f"{name[:start]}{text}{name[end + 1:]}", value(*case, key))
        return row

    def rows(self, cases: Iterable[object]) -> list[dict[str, Any]]:
        """A row for each case."""
        return [self.row(case) for case in cases]

    def meanings(self) -> dict[str, str]:
        """The meaning of each column, by its name."""
        flat = [part for column in self._columns for part in ([column] if isinstance(column, Column) else column.columns)]
        return {name: meaning for name, meaning, _ in flat}


def meanings_of(tables: Sequence[Table]) -> dict[str, dict[str, str]]:
    """The meanings of all columns by table. Parts of a table, which share its name, are joined."""
    joined: dict[str, dict[str, str]] = {}
    for table in tables:
        joined.setdefault(table.name, {}).update(table.meanings())
    return joined


def _add(row: dict[str, Any], name: str, value: object) -> None:
    if isinstance(value, IntervalEstimate):
        row.update(value.columns(name))
    elif value is not ABSENT:
        row[name] = value


def skipped(records: Sequence[Mapping]) -> int:
    """The number of records without a measurement."""
    return sum("skipped" in record for record in records)


PROBLEMS = Column("num_problems", "measured answers", lambda case: len(case.records) - skipped(case.records))
SKIPPED = Column("num_skipped", "answers with nothing to measure, or with logits that are not numbers",
                 lambda case: skipped(case.records))
"""Values of most summaries, for cases with the attribute `records`."""
