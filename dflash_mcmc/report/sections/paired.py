"""Compares every run with the baseline, problem by problem, and plans the number of problems of the next experiment."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dflash_mcmc.errors import UserError
from dflash_mcmc.report.parts import (
    Column,
    Drawing,
    Section,
    Table,
    counted,
    differing,
    ends,
    named,
    paragraphs,
    points,
    probability,
)
from dflash_mcmc.report.study import Entry, Study
from dflash_mcmc.statistics.intervals import IntervalEstimate
from dflash_mcmc.statistics.outcomes import PairedOutcomes, aligned
from dflash_mcmc.statistics.paired import LEVEL, compare, holm, verdict
from dflash_mcmc.statistics.power import detectable, detectable_by_spread, problems_by_spread, problems_needed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOUGHT = 0.03
"""The difference of accuracies that the power analysis plans for."""
_FEWEST = 10
"""The smallest number of common problems of a comparison in the figure. With fewer problems, intervals are too wide."""
VERDICTS = {"a better": "better", "b better": "worse", "tie": "tie"}
_NOTHING = dict.fromkeys(("both", "only_run", "only_baseline", "neither", "difference", "difference_low", "difference_high",
                          "p_value", "p_holm", "problems_for_3_points", "detectable_difference"))
_TEXT = """
Each run is compared with {baseline} on the problems that both have. The difference is in percentage points of accuracy; each
problem counts once. Its 95 % interval is Student's over problems, adjusted for few problems (Bonett & Price 2012). p comes
from the exact McNemar test if every problem has one chain in both runs, else from a paired permutation test over problems.
p (Holm) is adjusted for all rows of the table. A run is called better or worse if p (Holm) is at most 0.05, else the
verdict is a tie.

Two columns help to plan the next experiment, for a single comparison at p = 0.05 with 80 % power. One is the number of
problems needed to detect a difference of {sought:.0f} points. The other is the smallest difference that can be detected with
as many problems as in this comparison. With one chain per problem, both numbers assume that the share of problems that only
one of the runs solves stays the same. With several chains, they assume that the spread of the differences stays the same. A
hyphen means that no such number exists.
"""


def section(study: Study) -> Section | None:
    """One row for each run and vote other than the baseline."""
    base = study.entry(study.baseline)
    others = [entry for entry in study.entries if entry is not base]
    if not others:
        return None
    rows = [_row(entry, base) for entry in others]
    for row, adjusted in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        if adjusted is not None:
            row["p_holm"], row["verdict"] = adjusted, VERDICTS[verdict(row["difference"], adjusted)]
    title = f"Difference to {study.baseline.label}"
    names = {entry.shown for entry in study.drawn}
    shown = [row for row in rows if row["run"] in names and row["problems"] >= _FEWEST] or rows
    return Section("paired", "Compared with the baseline",
                   paragraphs(_TEXT.format(baseline=study.baseline.label, sought=100.0 * SOUGHT)),
                   [Table("paired", f"Compared with {study.baseline.label}", _columns(), rows)],
                   [Drawing(f"fig_{study.dataset}_paired", f"{title} with its 95 % interval{_too_few_problems(rows)}.",
                            lambda: _figure(title, shown))])


def _too_few_problems(rows: list[dict]) -> str:
    few = sum(row["problems"] < _FEWEST for row in rows)
    return f"; {few} with fewer than {_FEWEST} common problems are only in the table" if 0 < few < len(rows) else ""


def _row(entry: Entry, base: Entry) -> dict:
    own, other, left_out = aligned(entry.outcomes, base.outcomes)
    row = {"run": entry.shown, "baseline": base.shown, "problems": len(own.problems), "left_out": left_out}
    if not own.problems:
        return {**row, **_NOTHING, "test": "none", "verdict": "not compared: no problem in common"}
    found, planning = compare(own, other), planned(own, other, SOUGHT)
    planning["problems_for_3_points"] = planning.pop("problems_needed")
    return {**row, "both": found.both, "only_run": found.only_a, "only_baseline": found.only_b, "neither": found.neither,
            **found.difference.columns("difference"), "p_value": found.p_value, "p_holm": None, "test": found.test,
            "verdict": VERDICTS[found.verdict], **planning}


def planned(own: PairedOutcomes, other: PairedOutcomes, sought: float, level: float = LEVEL) -> dict[str, float | None]:
    """`problems_needed` to detect the difference `sought`, and `detectable_difference` with the problems of the runs.

    A value is None if the runs differ on too few problems to compute it.
    """
    differences, problems = own.correct - other.correct, len(own.problems)
    if own.single and other.single:
        discordant = float(np.abs(differences).mean())
        return {"problems_needed": _or_none(problems_needed, sought, discordant, level) if discordant >= sought else None,
                "detectable_difference": detectable(problems, discordant, level=level) if discordant else None}
    spread = float(differences.std(ddof=1)) if problems > 1 else 0.0
    return {"problems_needed": _or_none(problems_by_spread, sought, spread, level) if spread else None,
            "detectable_difference": detectable_by_spread(problems, spread, level=level) if spread else None}


def _or_none(needed: Callable[..., int], difference: float, varies: float, level: float) -> int | None:
    try:
        return needed(difference, varies, level=level)
    except UserError:  # more problems than the search allows
        return None


def _columns() -> list[Column]:
    return [
        named("run", "run"), counted("problems", "problems"), differing("difference (points)", "difference"),
        Column("p", lambda row: probability(row["p_value"])), Column("p (Holm)", lambda row: probability(row["p_holm"])),
        named("verdict", "verdict"), counted("both correct", "both"), counted("only run correct", "only_run"),
        counted("only baseline correct", "only_baseline"), counted("none correct", "neither"), named("test", "test"),
        counted("problems to detect 3 points", "problems_for_3_points"),
        Column("detectable difference (points)", lambda row: points(row["detectable_difference"]).lstrip("+")),
        counted("problems left out", "left_out"),
    ]


def _figure(title: str, rows: list[dict]) -> Figure:
    from matplotlib.figure import Figure

    from dflash_mcmc.report import figure

    labels = [row["run"] for row in rows]
    drawn = Figure(figsize=figure.rows_size(labels), layout="constrained")
    axes = drawn.subplots()
    figure.draw_estimates(axes, labels, [IntervalEstimate(*ends(row, "difference"), row["problems"]) for row in rows],
                          [_row_text(row) for row in rows], [row["verdict"] in ("better", "worse") for row in rows])
    axes.axvline(0.0, color=figure.INK, linewidth=0.8, zorder=1)
    axes.set_title(title)
    axes.set_xlabel("difference in accuracy (points), with 95 % intervals; p adjusted for all rows (Holm)")
    return drawn


def _row_text(row: dict) -> str:
    if row["difference"] is None:
        return row["verdict"]
    return f"{points(row['difference'])}   p {probability(row['p_holm'])}   {row['verdict']}   n {row['problems']:,}"
