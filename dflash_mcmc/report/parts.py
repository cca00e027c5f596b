"""The parts of a report section, and the formats of its numbers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tabulate import tabulate

from dflash_mcmc.errors import one_line
from dflash_mcmc.statistics.intervals import IntervalEstimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure



class ReportColumn(NamedTuple):
    """A column of a table as readers see it."""

    header: str
    text: Callable[[dict], str]
    """The text of a row's cell."""
    number: bool = True
    """Whether the column holds numbers, which are right-aligned."""


class ReportTable(NamedTuple):
    """A table: columns for readers, and a CSV file with all digits."""

    name: str
    """Name of the CSV file, without its ending."""
    title: str
    columns: Sequence[ReportColumn]
    rows: Sequence[dict]
    data: Sequence[dict] | None = None
    """Rows of the CSV file, if they differ from the rows shown to readers."""

    def cells(self) -> list[list[str]]:
        """The cell texts, row by row."""
        return [[column.text(row) for column in self.columns] for row in self.rows]


class Drawing(NamedTuple):
    """A figure: a PNG file, an SVG file, and a picture in the page."""

    name: str
    title: str
    """Description of the figure. It is also the alternative text for readers who cannot see the picture."""
    make: Callable[[], Figure]


class EmbeddedSamples(NamedTuple):
    """The data of a browser of samples, as texts that are safe inside HTML."""

    overview: str
    """What the list of problems shows and filters."""
    parts: Sequence[str]
    """Questions, prompts and answers, some problems each."""
    num_chains: int
    """Chains of each problem that are in the data, at most."""
    longest: int | None
    """Characters after which a text is cut; None if all are whole."""


class Section(NamedTuple):
    """A part of a report under a heading."""

    name: str
    title: str
    text: Sequence[str]
    """Paragraphs."""
    tables: Sequence[ReportTable] = ()
    drawings: Sequence[Drawing] = ()
    samples: EmbeddedSamples | None = None
    """Data of a browser of samples."""


class ReportPart(NamedTuple):
    """The sections of one dataset, or the only part of a report."""

    name: str
    """Beginning of the names of its sections' anchors; empty for the only part."""
    counts: str
    """A sentence on the size of the data."""
    warnings: Sequence[str]
    """Notes to read before the comparison."""
    sections: Sequence[Section]
    verdict: Sequence[str] = ()
    """Which runs differ, by how much, and what would resolve the largest difference that is not resolved."""

    @property
    def start(self) -> str:
        """The beginning of an anchor of this part."""
        return f"{self.name}-" if self.name else ""


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first names, and the number of the others."""
    return "; ".join(names[:most]) + (f"; and {len(names) - most:,} more" if len(names) > most else "")


def paragraphs(text: str) -> list[str]:
    """Splits a text into paragraphs at empty lines, and joins the lines of each."""
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def ends(row: dict, key: str) -> tuple[float | None, float | None, float | None]:
    """A value of a row and the ends of its interval."""
    return row[key], row.get(f"{key}_low"), row.get(f"{key}_high")


def text_of(table: ReportTable, cell: Callable[[str], str] = one_line, form: str = "github") -> str:
    """A table for a terminal, or for Markdown if `cell` escapes the characters that Markdown interprets, or as LaTeX."""
    return tabulated([cell(column.header) for column in table.columns], [[*map(cell, row)] for row in table.cells()],
                     ["right" if column.number else "left" for column in table.columns], form)


def tabulated(headers: Sequence[str], rows: Sequence[Sequence[str]], align: Sequence[str], form: str = "github") -> str:
    """A table as text. In a terminal, the columns that do not fit its width go below, with the first column again."""
    def text(columns: Sequence[int]) -> str:
        return tabulate([[row[place] for place in columns] for row in rows], [headers[place] for place in columns],
                        tablefmt=form, disable_numparse=True, colalign=[align[place] for place in columns] if rows else None)

    blocks = [[*range(len(headers))]]
    while sys.stdout.isatty() and len(blocks[-1]) > 2 and text(blocks[-1]).index("\n") > shutil.get_terminal_size().columns:
        last = blocks[-1]
        fits = next((end for end in range(len(last) - 1, 2, -1)
                     if text(last[:end]).index("\n") <= shutil.get_terminal_size().columns), 2)
        blocks[-1:] = [last[:fits], [0, *last[fits:]]]
    return "\n\n".join(map(text, blocks))


def named(header: str, key: str) -> ReportColumn:
    """A column of text."""
    return ReportColumn(header, lambda row: str(row[key]), number=False)


def counted(header: str, key: str) -> ReportColumn:
    """A column of counts."""
    return ReportColumn(header, lambda row: count(row[key]))


def shared(header: str, key: str) -> ReportColumn:
    """A column of shares in per cent, with intervals if the rows have them."""
    return ReportColumn(header, lambda row: percent(*ends(row, key)))


def differing(header: str, key: str) -> ReportColumn:
    """A column of differences between shares in percentage points, with intervals if the rows have them."""
    return ReportColumn(header, lambda row: points(*ends(row, key)))


def numbered(header: str, key: str, form: str = ".3g") -> ReportColumn:
    """A column of numbers in a format."""
    return ReportColumn(header, lambda row: "-" if row[key] is None else f"{row[key]:{form}}")


def costing(header: str, key: str) -> ReportColumn:
    """A column of costs: whole numbers from 100 on, three digits below."""
    return ReportColumn(
        header, lambda row: "-" if row[key] is None else f"{row[key]:{',.0f' if row[key] >= 100.0 else '.3g'}}")


def percent(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """`71.2 % [61.8, 79.0]`; a hyphen if there is no value."""
    if value is None:
        return "-"
    return f"{100.0 * value:.1f} %" + ("" if low is None or high is None else f" [{100.0 * low:.1f}, {100.0 * high:.1f}]")


def points(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A difference of two shares in percentage points: `+5.8 [+0.0, +11.5]`."""
    if value is None:
        return "-"
    return f"{100.0 * value:+.1f}" + ("" if low is None or high is None else f" [{100.0 * low:+.1f}, {100.0 * high:+.1f}]")


def count(value: float | None) -> str:
    """`1,234`, or `8.25` for a sum of shares."""
    if value is None:
        return "-"
    return f"{round(value):,}" if abs(value - round(value)) < 1e-9 else f"{value:,.2f}"


def probability(value: float | None) -> str:
    """A p-value: `0.070`, `<0.001`."""
    if value is None:
        return "-"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


HOLM = ReportColumn("p (Holm)", lambda row: probability(row["p_holm"]))
P_VALUES = ReportColumn("p", lambda row: probability(row["p_value"])), HOLM
"""The columns of a p-value, and of that adjusted for all rows."""


def accurate(estimate: IntervalEstimate) -> dict[str, float | None]:
    """The columns of an accuracy and its interval, and the number of samples."""
    return {**estimate.columns("accuracy"), "n": estimate.n}
