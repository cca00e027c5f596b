"""What a section of a report is made of, and how its numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.statistics.intervals import IntervalEstimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Column(NamedTuple):
    """A column of a table as it is read."""

    header: str
    text: Callable[[dict], str]
    """Of a row."""
    number: bool = True
    """Numbers stand to the right."""


class Table(NamedTuple):
    """A table: read in its columns, and a CSV file with all digits of its data."""

    name: str
    """Of the CSV file."""
    title: str
    columns: Sequence[Column]
    rows: Sequence[dict]
    data: Sequence[dict] | None = None
    """Rows of the CSV file where they are not the rows that are read."""

    def cells(self) -> list[list[str]]:
        """The texts, row by row."""
        return [[column.text(row) for column in self.columns] for row in self.rows]


class Drawing(NamedTuple):
    """A figure: a PNG and an SVG file, and a picture in the page."""

    name: str
    title: str
    """What it shows, for those who do not see it too."""
    make: Callable[[], Figure]


class Section(NamedTuple):
    """A part of a report under a heading."""

    name: str
    title: str
    text: Sequence[str]
    """Paragraphs."""
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()


def paragraphs(text: str) -> list[str]:
    """Paragraphs of a text that is broken into lines; an empty line parts them."""
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def ends(row: dict, key: str) -> tuple[float | None, float | None, float | None]:
    """A number of a row with the ends of its interval."""
    return row[key], row.get(f"{key}_low"), row.get(f"{key}_high")


def named(header: str, key: str) -> Column:
    """A column of texts."""
    return Column(header, lambda row: str(row[key]), number=False)


def counted(header: str, key: str) -> Column:
    """A column of numbers of things."""
    return Column(header, lambda row: count(row[key]))


def shared(header: str, key: str) -> Column:
    """A column of shares in per cent, with intervals where the row has them."""
    return Column(header, lambda row: percent(*ends(row, key)))


def differing(header: str, key: str) -> Column:
    """A column of differences of shares in points, with intervals where the row has them."""
    return Column(header, lambda row: points(*ends(row, key)))


def percent(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """`71.2 % [61.8, 79.0]`; a hyphen where there is no number."""
    if value is None:
        return "-"
    return f"{100.0 * value:.1f} %" + ("" if low is None else f" [{100.0 * low:.1f}, {100.0 * high:.1f}]")


def points(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A difference of two shares in points: `+5.8 [+0.0, +11.5]`."""
    if value is None:
        return "-"
    return f"{100.0 * value:+.1f}" + ("" if low is None else f" [{100.0 * low:+.1f}, {100.0 * high:+.1f}]")


def count(value: float | None) -> str:
    """`1,234`, or `8.25` where it is a sum of shares."""
    if value is None:
        return "-"
    return f"{round(value):,}" if abs(value - round(value)) < 1e-9 else f"{value:,.2f}"


def probability(value: float | None) -> str:
    """A p-value: `0.070`, `<0.001`."""
    if value is None:
        return "-"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def accurate(estimate: IntervalEstimate) -> dict[str, float | None]:
    """The columns of an accuracy, and of how many samples it is."""
    return {**estimate.columns("accuracy"), "n": estimate.n}
