"""The tables that probes write, with intervals. A column has its name, its meaning and its computation in one place.

A row is computed from one case, mostly `Observations`: values of tokens, blocks or answers, and what the row is called by. The
documentation takes the meanings, and a probe takes the rows, so that no column is without a meaning and no meaning without a
column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

ABSENT = object()
"""The value of a column that a row does not have."""

Column = tuple[str, str] | tuple[str, str, Callable[..., object]]
"""A column: its name, its meaning with the unit, and its value: case -> a JSON value, an `IntervalEstimate` (columns `name`,
`name_low`, `name_high`), or `ABSENT`. Without a computation the value is `case[name]`."""


class Each(NamedTuple):
    """Columns that a row has once for each of several keys. Their values are functions of the case and of the key.

    Attributes:
        keys: case -> the texts that replace the part of the names in braces, which are the keys, or map to them.
        columns: the columns for one key.
    """

    keys: Callable[[Any], Mapping[str, Any] | Iterable[str]]
    columns: Sequence[Column]


class Observations:
    """The observations that a row is about, in clusters of problems, and what the row is called by.

    Args:
        columns: values of the observations by name; the column `problem` has their clusters. Intervals resample all of them.
            With a column `n` each observation has sums over so many.
        among: bool (observations,), those of the row; None for all.
        names: the names and other values of the row.

    Attributes:
        values: the columns as arrays.
    """

    def __init__(self, columns: Mapping[str, ArrayLike], among: np.ndarray | None = None, clusters: Clusters | None = None,
                 **names: Any):
        self.values, self.names = {name: np.asarray(values) for name, values in columns.items()}, names
        self.clusters = clusters or Clusters(self.values["problem"].tolist())
        self.among = np.ones(self.clusters.size, bool) if among is None else among

    def __getitem__(self, name: str) -> Any:
        """A name of the row, or else the mean of a column."""
        return self.names[name] if name in self.names else self.mean(name)

    def row(self, among: np.ndarray | None = None, **names: Any) -> Observations:
        """The observations of a row that are among these, and its further names."""
        both = self.among if among is None else self.among & among
        return Observations(self.values, both, self.clusters, **{**self.names, **names})

    @property
    def n(self) -> int:
        """The number of the row's observations."""
        return round(self.values["n"][self.among].sum()) if "n" in self.values else int(self.among.sum())

    def mean(self, values: str | ArrayLike) -> IntervalEstimate:
        """The mean over the row's observations of a column, or of values of all observations."""
        return self.ratio(values, "n") if "n" in self.values else self.clusters.mean(self._of(values), self.among)

    def ratio(self, above: str | ArrayLike, below: str | ArrayLike) -> IntervalEstimate:
        """The sum of one column or value over the row's observations, divided by that of another."""
        return self.clusters.ratio(*(np.where(self.among, self._of(part), 0.0) for part in (above, below)))

    def quantiles(self, column: str, levels: Sequence[float]) -> list[IntervalEstimate]:
        """Quantiles of a column over all observations."""
        return self.clusters.quantiles(self.values[column], levels)

    def _of(self, values: str | ArrayLike) -> ArrayLike:
        return self.values[values] if isinstance(values, str) else values


class Table:
    """A table of a probe, or with the name `values` a part of the values of its summary.

    Args:
        name: its name, which is also the name of its CSV file.
        columns: its columns in their order.
    """

    def __init__(self, name: str, columns: Sequence[Column | Each]):
        self.name, self.columns = name, columns

    def row(self, case: Any) -> dict[str, Any]:
        """The row of a case."""
        row: dict[str, Any] = {}

        def add(name: str, value: object) -> None:
            if value is not ABSENT:
                row.update(value.columns(name) if isinstance(value, IntervalEstimate) else {name: value})

        for column in self.columns:
            if not isinstance(column, Each):
                add(column[0], column[2](case) if len(column) == 3 else case[column[0]])
                continue
            keys = column.keys(case)
            for text, key in (keys if isinstance(keys, Mapping) else {key: key for key in keys}).items():
                for name, _, made in column.columns:  # type: ignore[misc]  # each has a computation
                    add(f"{name[:name.index('{')]}{text}{name[name.rindex('}') + 1:]}", made(case, key))
        return row

    def rows(self, cases: Iterable[Any]) -> list[dict[str, Any]]:
        """A row for each case."""
        return [self.row(case) for case in cases]


def meanings_of(tables: Sequence[Table]) -> dict[str, dict[str, str]]:
    """The meaning of each column by its name, by table. Parts of a table, which share its name, are joined."""
    joined: dict[str, dict[str, str]] = {}
    for table in tables:
        for column in table.columns:
            joined.setdefault(table.name, {}).update(
                (each[0], each[1]) for each in (column.columns if isinstance(column, Each) else [column]))
    return joined


def measured(records: Iterable[dict]) -> list[dict]:
    """The records of what was measured."""
    return [record for record in records if "skipped" not in record]


# Values of most summaries, for cases with all `records`.
PROBLEMS = ("num_problems", "measured answers", lambda of: len(measured(of["records"])))
SKIPPED = ("num_skipped", "answers with nothing to measure, or with logits that are not numbers",
           lambda of: len(of["records"]) - len(measured(of["records"])))
