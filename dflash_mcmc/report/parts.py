"""The parts of a report, its one type of table, the formats of its numbers, and the tables that runs print at their end."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tabulate import tabulate

from dflash_mcmc.config.identity import configuration_of, labels_of, with_names
from dflash_mcmc.errors import one_line
from dflash_mcmc.statistics.estimates import cautions
from dflash_mcmc.statistics.paired import Paired, holm, verdict
from dflash_mcmc.statistics.summaries import TIMES, aggregates_of
from dflash_mcmc.store import records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STARTS_OF_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Characters that begin a formula in Excel, LibreOffice or Google Sheets; the last four are their full-width forms."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
VERDICTS = {"a better": "better", "b better": "worse", "tie": "not resolved"}
"""The words of a table for the verdicts of `statistics.paired`."""


class ReportTable(NamedTuple):
    """A table: the columns that readers see, and a CSV file with all digits."""

    name: str
    """Name of the CSV file, without its ending."""
    title: str
    columns: Mapping[str, Any]
    """By header: the key of a text; the key and the format of a number (`number`); or what gives a number's text for a row."""
    rows: Sequence[dict]
    data: Sequence[Mapping[str, Any]] | None = None
    """Rows of the CSV file, if they differ from the rows shown to readers."""

    def cells(self) -> list[list[str]]:
        """The texts that readers see, row by row."""
        return [[text(row.get(of)) if isinstance(of, str) else of(row) if callable(of) else number(row, *of)
                 for of in self.columns.values()] for row in self.rows]

    @property
    def align(self) -> list[str]:
        """`left` for each column of texts, `right` for numbers."""
        return ["left" if isinstance(of, str) else "right" for of in self.columns.values()]


class Drawing(NamedTuple):
    """A figure: a PNG file, an SVG file, and a picture in the page."""

    name: str
    title: str
    """Description of the figure. It is also the alternative text for readers who cannot see the picture."""
    make: "Callable[[], Figure]"


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


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV with all digits; a missing value is an empty cell.

    A spreadsheet takes a text with certain first characters for a formula and evaluates it. An apostrophe goes before such a
    text, which spreadsheets read as "this is a text" (OWASP, CSV injection). Numbers stay as they are.
    """
    def cell(value: object) -> str:
        text = "" if value is None else str(value)
        if isinstance(value, str) and text.startswith(_STARTS_OF_FORMULAS) and not _NUMBER.fullmatch(text):
            text = f"'{text}"
        if any(sign in text for sign in ',"\r\n'):  # Python's csv module does not quote a lone \r
            return '"' + text.replace('"', '""') + '"'
        return text

    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [list[Any](keys), *([row.get(key) for key in keys] for row in rows)]
    return "".join(",".join(map(cell, line)) + "\n" for line in lines)


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first names, and the number of the others."""
    return "; ".join(names[:most]) + (f"; and {len(names) - most:,} more" if len(names) > most else "")


def paragraphs(text: str) -> list[str]:
    """Splits a text into paragraphs at empty lines, and joins the lines of each."""
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def as_text(table: ReportTable, cell: Callable[[str], str] = one_line, form: str = "github") -> str:
    """A table for a terminal, or for Markdown if `cell` escapes the characters that Markdown interprets, or as LaTeX."""
    return tabulated([*map(cell, table.columns)], [[*map(cell, row)] for row in table.cells()], table.align, form)


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


def text(value: object) -> str:
    """A text, or a setting as it is typed; a hyphen if there is none."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def number(row: Mapping[str, Any], key: str, form: str) -> str:
    """A number of a row; a hyphen if there is none.

    Args:
        form: `count`, `share`, `points` or `p` (see the functions below), the first two with the interval that the row may
            have; `cost`, in whole numbers from 100 on and with three digits below; or a format of Python, "" for a ready text.
    """
    value = row.get(key)
    if form in ("share", "points"):
        return (percent if form == "share" else points)(value, row.get(f"{key}_low"), row.get(f"{key}_high"))
    if form in ("count", "p"):
        return (count if form == "count" else probability)(value)
    return "-" if value is None else f"{value:{form if form != 'cost' else ',.0f' if value >= 100.0 else '.3g'}}"


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


def p_is(value: float | None) -> str:
    """A p-value in a sentence: `p = 0.070`, `p < 0.001`."""
    return f"p = {probability(value)}".replace("= <", "< ")


P_VALUES = {"p": ("p_value", "p"), "p (Holm)": ("p_holm", "p")}
"""The columns of a p-value, and of that adjusted for all rows."""


def differences(paired: Paired) -> dict[str, Any]:
    """The columns of a paired comparison that `adjusted` completes."""
    return {**paired.difference.columns("difference"), "p_value": paired.p_value, "p_holm": None, "verdict": VERDICTS["tie"]}


def adjusted(rows: list[dict], word: Callable[[dict, float], str] = lambda row, p: VERDICTS[verdict(row["difference"], p)]
             ) -> list[dict]:
    """The rows with `p_holm`, their `p_value` adjusted for all of them, and `verdict`: `word(row, p_holm)`."""
    for row, p in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        if p is not None:
            row["p_holm"], row["verdict"] = p, word(row, p)
    return rows


COLUMNS: dict[str, Any] = {
    "correct": ("correct", "count"), "total": ("num_samples", "d"), "accuracy": lambda row: percent(row["accuracy"]),
    "95 % interval": lambda row: f"{100 * row['accuracy_low']:.1f} - {100 * row['accuracy_high']:.1f}",
    "avg tokens": ("mean_tokens", ".1f"), "avg time (s)": ("mean_seconds", ".2f"),
    "MH accept": lambda row: percent(row["acceptance"]), "moved": lambda row: percent(row["moved_rate"]),
    "no answer": lambda row: str(row["no_answer"] + row["not_drawn"]), "token-forwards": ("token_forwards", ",.0f")}
"""The columns of a summary that every table of runs has."""
DRAFTED = {"accepted length": ("accepted_length", ".2f")}
"""A column that is shown if a run used a draft."""
_TOO_LONG = {"too long": lambda row: str(row.get("too_long", 0))}
"""A column that is shown if prompts did not fit into the model's positions. These samples count as not correct."""
_UNLIKE = ("The rows cover different samples: each row uses all recorded samples of its run. python -m dflash_mcmc.report "
           "compares runs on the problems that they share.")


def overall(folders: Sequence[Path]) -> str:
    """The summary table, with rows in the order of the folders. Settings in which runs of one condition differ are named."""
    summaries = [records.json_object(folder / "summary.json") for folder in folders]
    identities = [records.described(folder / records.RUN).identity for folder in folders]
    labels = labels_of([s["condition"] for s in summaries], identities, [configuration_of(folder) for folder in folders])
    rows: list[dict[str, Any]] = []
    for label, summary in zip(labels, summaries, strict=True):  # a summary has its chains combined to one answer, too
        combined = [{**way, "run": str(way["condition"]).replace(summary["condition"], label, 1)}
                    for way in aggregates_of(summary)]
        rows += [row for row in ({**summary, "run": label}, *combined) if summary["num_samples"] and row["num_samples"]]
    columns = {"condition": "run", **COLUMNS}
    columns |= DRAFTED if any(row["accepted_length"] is not None for row in rows) else {}
    columns |= _TOO_LONG if any(row.get("too_long") for row in rows) else {}
    weights = [f"{row['run']}: {row['effective_chains']:.1f} effective chains (mean); one chain has most of the weight on "
               f"{100 * row['dominated']:.0f} % of the problems." for row in rows if "effective_chains" in row]
    measured, ends, spent = [], [], []
    for label, summary, identity in zip(labels, summaries, identities, strict=True):
        means = [f"{name.removeprefix('measures/')} {value:.3g}" for name, value in summary.items()
                 if name.startswith("measures/")]
        measured += [f"{label}: {', '.join(means)} (means)"] if means else []
        if remark := records.finish_remark(summary, identity.get("dataset.max_new_tokens")):
            ends.append(f"{label}: {remark}.")
        seconds = {part: summary.get(f"mean_{part}_seconds") for part in TIMES}
        known = [f"{part} {value:.3g}" if value >= 0.001 else f"{part} < 0.001"
                 for part, value in seconds.items() if value is not None]
        unknown = " and ".join(part for part, value in seconds.items() if value is None)
        if known:
            spent.append(f"{label}: seconds a sample: {', '.join(known)}{f' ({unknown} not measured)' if unknown else ''}.")
    few = cautions(each["num_problems"] for each in summaries if each["num_samples"] > each["num_problems"])
    unlike = [_UNLIKE] if len({summary["num_samples"] for summary in summaries if summary["num_samples"]}) > 1 else []
    lines = map("\n".join, (weights, measured, ends, spent, few, unlike))
    return "\n\n".join(filter(None, [as_text(ReportTable("", "", columns, rows)), *lines]))


def of_probes(folders: Sequence[Path]) -> str:
    """The tables of finished runs. Runs of a probe share its tables; the first columns are the settings that vary."""
    identities = [records.json_object(folder / records.RUN)["identity"] for folder in folders]
    identities = with_names(identities, [configuration_of(folder) for folder in folders])
    runs: dict[str, list[tuple[dict, dict]]] = {}
    for folder, identity in zip(folders, identities, strict=True):
        summary = records.json_object(folder / "summary.json")
        runs.setdefault(summary["probe"], []).append((identity, summary))
    texts = []
    for probe, of_probe in runs.items():
        keys = dict.fromkeys(key for identity, _ in of_probe for key in identity)
        varying = {key: key.removesuffix(".content").rpartition(".")[2] for key in keys  # `model` for `model.content`
                   if len({json.dumps(identity.get(key)) for identity, _ in of_probe}) > 1}
        for name in dict.fromkeys(name for _, summary in of_probe for name in summary["tables"]):
            rows = [{**{header: identity.get(key) for key, header in varying.items()}, **row}
                    for identity, summary in of_probe for row in summary["tables"].get(name, [])]
            texts.append(f"{probe}: {name}\n" + as_text(table_of(name, "", rows)))
        texts += cautions([summary.get("num_problems", 0) for _, summary in of_probe])
    return "\n\n".join(texts)


def table_of(name: str, title: str, rows: Sequence[Mapping[str, Any]]) -> ReportTable:
    """A table: numbers with four significant digits, an interval after its value."""
    merged = []
    for row in rows:  # `x`, `x_low` and `x_high` are one cell
        of = {key: (row[f"{key}_low"], row[f"{key}_high"]) for key in row if f"{key}_low" in row}
        ends = {f"{key}{end}" for key in of for end in ("_low", "_high")}
        merged.append({key: (value, *of[key]) if key in of else value for key, value in row.items() if key not in ends})
    keys = dict.fromkeys(key for row in merged for key in row)
    numbers = {key for key in keys if all(isinstance(row.get(key), int | float | tuple | None) for row in merged)}
    texts = [{key: _cell(row.get(key)) for key in keys} for row in merged]
    columns = {key.replace("_", " "): (key, "") if key in numbers else key for key in keys}
    return ReportTable(name, title, columns, texts, data=rows)


def _cell(value: object, digits: int = 4) -> str:
    if isinstance(value, tuple):
        of, low, high = (_cell(end, digits=3) for end in value)
        return of if low == "-" else f"{of} [{low}, {high}]"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else "-" if value is None else str(value)
