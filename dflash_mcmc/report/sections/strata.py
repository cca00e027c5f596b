"""Accuracy on parts of the problems: solved and not solved by greedy decoding, each level, and each subject.

This is section 4.2 of the guided-power-sampling document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from dflash_mcmc.report.parts import Column, Drawing, Section, Table, accurate, count, ends, named, paragraphs, percent
from dflash_mcmc.report.study import Entry, Study
from dflash_mcmc.statistics.intervals import IntervalEstimate
from dflash_mcmc.statistics.shares import accuracy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.statistics.outcomes import Outcome

_BY_GREEDY = ("easy (greedy right)", "hard (greedy wrong)")
_EASY = """
Easy problems are those that {greedy} solves. Hard problems are the others. Its own 100 % and 0 % follow from this definition.
The split depends on a single outcome of greedy decoding. It makes every other run look better on the hard part and worse on
the easy part than it is. Within a part, compare runs with each other, not with greedy decoding.
"""
_COUNTS = """
The counts after each accuracy are correct samples and all samples; n in a heading is the number of problems. The CSV files
have the intervals.
"""


def section(study: Study) -> Section | None:
    """A table for each split of the problems that has at least two parts."""
    text, tables, drawings = "", [], []
    greedy = study.role("greedy", "none")
    if greedy:
        easy = _solved(study.entry(greedy[0]))
        rows = _rows(study.entries, {problem: _BY_GREEDY[not right] for problem, right in easy.items()}, _BY_GREEDY)
        tables.append(_table("difficulty", "By the correctness of greedy decoding", rows, _BY_GREEDY))
        caption = "Accuracy on problems that greedy decoding solves, and on those that it does not."
        drawings.append(Drawing(f"fig_{study.dataset}_difficulty", caption, lambda: _figure(study, rows)))
        text += _EASY.format(greedy=greedy[0].shown)
    splits: tuple[Literal["level", "subject"], ...] = ("level", "subject")
    for key in splits:
        of = {record["problem"]: str(record[key]) for run in study.runs for record in run.records if record[key] is not None}
        strata = sorted(set(of.values()), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
        if len(strata) > 1:
            tables.append(_table(f"{key}s", f"By {key}", _rows(study.entries, of, strata), strata))
    if not tables:
        return None
    return Section("strata", "By difficulty and subject", paragraphs(f"{text}\n\n{_COUNTS}"), tables, drawings)


def _solved(entry: Entry) -> dict[str, bool]:
    return dict(zip(entry.outcomes.problems, (entry.outcomes.correct > 0.5).tolist(), strict=True))


def _rows(entries: Sequence[Entry], stratum_of: dict[str, str], strata: Sequence[str]) -> list[dict]:
    """One row for each run and each stratum that the run has records in."""
    rows = []
    for entry in entries:
        parts: dict[str, list[Outcome]] = {stratum: [] for stratum in strata}
        for record in entry.records:
            if record["problem"] in stratum_of:
                parts[stratum_of[record["problem"]]].append(record)
        for stratum, records in parts.items():
            if records:
                share = accuracy(records)
                rows.append({"run": entry.shown, "stratum": stratum, "correct": share.known * share.n, **accurate(share),
                             "problems": len({record["problem"] for record in records})})
    return rows


def _table(name: str, title: str, rows: list[dict], strata: Sequence[str]) -> Table:
    """One row per run, one column per stratum."""
    wide: dict[str, dict] = {}
    for row in rows:
        wide.setdefault(row["run"], {"run": row["run"]})[row["stratum"]] = row
    problems = {stratum: max((row["problems"] for row in rows if row["stratum"] == stratum), default=0) for stratum in strata}

    def column(stratum: str) -> Column:
        def text(row: dict) -> str:
            part = row.get(stratum)
            return "-" if part is None else f"{percent(part['accuracy'])} ({count(part['correct'])}/{part['n']:,})"
        return Column(f"{stratum}, n = {problems[stratum]:,}", text)

    return Table(name, title, [named("run", "run"), *map(column, strata)], list(wide.values()), data=rows)


def _figure(study: Study, rows: list[dict]) -> Figure:
    from matplotlib.figure import Figure

    from dflash_mcmc.report import figure

    labels = [entry.shown for entry in study.drawn]
    drawn = Figure(figsize=figure.rows_size(labels, 2), layout="constrained")
    for axes, stratum in zip(drawn.subplots(1, 2, sharey=True), _BY_GREEDY, strict=True):
        of = {row["run"]: row for row in rows if row["stratum"] == stratum}
        found = [of.get(label) for label in labels]
        estimates = [IntervalEstimate(*ends(row, "accuracy"), row["n"]) if row else IntervalEstimate(None, None, None, 0)
                     for row in found]
        texts = [f"{count(row['correct'])}/{row['n']:,}" if row else "-" for row in found]
        figure.draw_estimates(axes, labels, estimates, texts)
        axes.set_title(f"{stratum}, n = {max((row['problems'] for row in of.values()), default=0):,}")
        axes.set_xlabel("correct answers, %, with 95 % intervals")
        axes.set_xlim(-4, 104)
    return drawn
