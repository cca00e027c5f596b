"""Accuracy, length, time and acceptance of every run: the table of the guided-power-sampling document, section 4.1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.grading.verdicts import VERDICTS
from dflash_mcmc.report import figure
from dflash_mcmc.report.parts import Column, Drawing, Section, Table, count, counted, named, paragraphs, percent
from dflash_mcmc.report.study import Entry, Study
from dflash_mcmc.report.table import HEADERS, row_of
from dflash_mcmc.statistics import summaries
from dflash_mcmc.store import finishes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEXT = """
Accuracy counts every sample. Intervals are 95 %: Wilson's with one chain per problem, else from a bootstrap over problems. MH
accept is the share of proposals that were accepted; moved is the share that was accepted and changed the sequence.

Every sample that is not correct counts as wrong. Methods can differ strongly in how many samples have no answer at all; a gain
in accuracy may then be a gain in formatting. Unsupported answers exceed a limit of the grader, timeouts used up its time, and
errors made it fail. String match is the accuracy by the string rule of published numbers (PRM800K's normalisation without its
algebra), for comparison only; the verdicts do not use it.
"""
_VOTES = """
A majority or best-of-N row combines the given number of chains into one answer per problem, for the problems that have all
chains. A tied vote counts as its expected value. If a vote uses fewer chains than are recorded, the row is the mean over all
ways to choose them. Its tokens and token-forwards are sums over its chains. Its time is that of the slowest chain. Answers
count as the same vote if their normalised strings are equal; the gold answer has no influence. Independent draws have a row
for each number of chains that costs as much as another run, as a baseline of equal compute. The weighted votes that a run's
`aggregate` names have rows too; the section on rules of votes explains them and compares all of them.
"""


def section(study: Study) -> Section:
    """One row per run, and one per way to combine its chains if it has several."""
    rows = [{"run": entry.shown, **summary_of(entry)} for entry in study.entries]
    columns = [named("condition", "run"), *_columns()]
    if any(row["accepted_length"] is not None for row in rows):
        columns.append(Column("accepted length", _accepted_length))
    text = paragraphs(_TEXT) + (paragraphs(_VOTES) if any(entry.voted for entry in study.entries) else [])
    verdicts = [{"run": entry.shown, **summary_of(entry)} for entry in study.entries if not entry.voted]
    runs = [entry for entry in study.drawn if not entry.voted]  # a vote has no end of its own
    ends = [{"run": entry.shown, **finishes.counts(entry.records)} for entry in runs]
    text += [f"{entry.shown}: {remark}." for entry, row in zip(runs, ends, strict=True)
             if (remark := finishes.remark(row, entry.run.identity.get("dataset.max_new_tokens")))]
    return Section("overall", "Overall", text, [Table("overall", "All runs", columns, rows),
                                                Table("verdicts", "Verdicts", _verdict_columns(), verdicts),
                                                Table("ends", "Why answers ended", _end_columns(), ends)],
                   [Drawing(f"fig_{study.dataset}_accuracy", "Accuracy of every run with its 95 % interval.",
                            lambda: _figure(study))])


def summary_of(entry: Entry) -> dict:
    """`summaries.summarise` of an entry; for a vote the number of correct answers is its expected value."""
    if not entry.voted:
        return {**summaries.summarise(entry.run.condition, entry.records), "complete": entry.run.complete}
    summary = summaries.summarise(entry.run.condition, entry.records)
    return {**summary, "correct": float(entry.outcomes.correct.sum()), "complete": entry.run.complete}


def _columns() -> list[Column]:
    """The columns of `report/table.py`, so that the page and the terminal agree."""
    def cell(number: int) -> Column:
        return Column(HEADERS[number], lambda row: row_of("", row)[number])
    return [cell(number) for number in range(1, len(HEADERS))]


def _verdict_columns() -> list[Column]:
    """The count of every verdict, and the accuracy by string match."""
    def by_strings(row: dict) -> str:
        return "-" if row["same_string"] is None else percent(row["same_string"] / row["num_samples"])
    return [named("run", "run"), *(counted(verdict.replace("_", " "), verdict) for verdict in VERDICTS),
            Column("accuracy", lambda row: percent(row["accuracy"])), Column("string match", by_strings)]


def _end_columns() -> list[Column]:
    """The count of every reason why a sequence ended."""
    names = {finishes.STOP_ID: "stop id", finishes.STOP_STRING: "stop string", finishes.LENGTH: "cut off"}
    return [named("run", "run"), *(counted(names.get(reason, reason.replace("_", " ")), f"finish_reason/{reason}")
                                   for reason in finishes.REASONS)]


def _accepted_length(row: dict) -> str:
    return "-" if row["accepted_length"] is None else f"{row['accepted_length']:.2f}"


def _figure(study: Study) -> Figure:
    from matplotlib.figure import Figure

    labels, estimates = [entry.shown for entry in study.drawn], [entry.accuracy for entry in study.drawn]
    same = set(study.baseline.problems)  # runs over other, maybe easier, problems are not ranked
    ranked = [entry.run.complete and set(entry.outcomes.problems) == same for entry in study.drawn]
    best = max((entry.accuracy.known for entry, counts in zip(study.drawn, ranked, strict=True) if counts), default=None)
    texts = [f"{percent(estimate.value)}   {count(estimate.known * estimate.n)} of {estimate.n:,}" for estimate in estimates]
    drawn = Figure(figsize=figure.rows_size(labels), layout="constrained")
    axes = drawn.subplots()
    figure.draw_estimates(axes, labels, estimates, texts,
                          [counts and entry.accuracy.value == best
                           for entry, counts in zip(study.drawn, ranked, strict=True)])
    axes.axvline(100.0 * study.entry(study.baseline).accuracy.known, color=figure.INK, linewidth=0.8, linestyle=":", zorder=1)
    axes.set_title(f"Accuracy on {study.dataset}")
    axes.set_xlabel(f"correct answers, %, with 95 % intervals; dotted: {study.baseline.label}")
    return drawn
