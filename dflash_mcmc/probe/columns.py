"""The tables that probes write. A column has its name, its meaning and its computation in one place.

A table has a row for each case: an object, or several, that the columns of the row are computed from. The documentation takes
the meanings, and a probe takes the rows, so that no column is without a meaning and no meaning without a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dflash_mcmc.statistics.intervals import IntervalEstimate

ABSENT = object()
"""The value of a column that a row does not have."""

Column = tuple[str, str, Callable[..., object]]
"""A column: its name, its meaning with the unit, and its value: case -> a JSON value, an `IntervalEstimate` (columns `name`,
`name_low`, `name_high`), or `ABSENT`."""


class Each(NamedTuple):
    """Columns that a row has once for each of several keys. Their values are functions of the case and of the key.

    Attributes:
        keys: case -> the keys by the text that replaces the part of the names in braces.
        columns: the columns for one key.
    """

    keys: Callable[..., Mapping[str, Any]]
    columns: Sequence[Column]


class Table:
    """A table of a probe, or with the name `values` a part of the values of its summary.

    Args:
        name: its name, which is also the name of its CSV file.
        columns: its columns in their order.
    """

    def __init__(self, name: str, columns: Sequence[Column | Each]):
        self.name, self.columns = name, columns

    def row(self, *case: Any) -> dict[str, Any]:
        """The row of a case, of one or several objects."""
        found: list[tuple[str, object]] = []
        for column in self.columns:
            if not isinstance(column, Each):
                found.append((column[0], column[2](*case)))
                continue
            for text, key in column.keys(*case).items():
                for name, _, made in column.columns:
                    start, end = name.index("{"), name.rindex("}")
                    found.append((f"{name[:start]}{text}{name[end + 1:]}", made(*case, key)))
        row: dict[str, Any] = {}
        for name, value in found:
            if value is not ABSENT:
                row.update(value.columns(name) if isinstance(value, IntervalEstimate) else {name: value})
        return row

    def rows(self, cases: Iterable[object]) -> list[dict[str, Any]]:
        """A row for each case: an object, or a tuple of several."""
        return [self.row(*case) if isinstance(case, tuple) else self.row(case) for case in cases]


def meanings_of(tables: Sequence[Table]) -> dict[str, dict[str, str]]:
    """The meaning of each column by its name, by table. Parts of a table, which share its name, are joined."""
    joined: dict[str, dict[str, str]] = {}
    for table in tables:
        for column in table.columns:
            joined.setdefault(table.name, {}).update(
                (name, meaning) for name, meaning, _ in (column.columns if isinstance(column, Each) else [column]))
    return joined


# Values of most summaries, for cases whose first object is the list of all records.
PROBLEMS = ("num_problems", "measured answers", lambda records, *_: sum("skipped" not in record for record in records))
SKIPPED = ("num_skipped", "answers with nothing to measure, or with logits that are not numbers",
           lambda records, *_: sum("skipped" in record for record in records))
