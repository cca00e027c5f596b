"""Paired comparisons of logs with the first of them: `python -m dflash_mcmc.compare`, and `compare` in Python.

Each log is compared on the problems that it shares with the first. Several samples of a problem are one cluster. The tests and
intervals are those of a report (`statistics/paired.py`), and p is adjusted for all comparisons (Holm 1979).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.errors import UserError
from dflash_mcmc.report import figure
from dflash_mcmc.report.logs import Log
from dflash_mcmc.report.parts import P_VALUES, Drawing, ReportPart, ReportTable, Section, adjusted, differences
from dflash_mcmc.statistics.outcomes import accuracy_of, aligned
from dflash_mcmc.statistics.paired import VarianceParts, compare

COLUMNS = ("run", "problems", "samples", "accuracy", "accuracy_low", "accuracy_high", "baseline", "common", "difference",
           "difference_low", "difference_high", "won", "lost", "p_value", "p_holm", "test", "verdict", "problems_needed")
"""Accuracies and differences are shares, over problems, with 95 % intervals. `won` and `lost` count the common problems whose
mean is above and below that of the baseline. `problems_needed` detects a difference of this size at p = 0.05 with 80 % power,
with as many chains of a problem as here."""
_METHOD = ("Each log is compared with the first on the problems that both have; the samples of a problem are one cluster. "
           "With one verdict a problem the test is McNemar's exact test, else a permutation of the signs of the differences. "
           "Intervals are Student's over problems, adjusted for few problems (Bonett & Price 2012). p (Holm) is adjusted for "
           "all comparisons; a difference is resolved if it is at most 0.05.")


class Comparison(NamedTuple):
    """Compared logs."""

    table: ReportTable
    """A row for each log with the columns of `COLUMNS`; that of the baseline has no difference."""
    notes: list[str]
    """Lines on what was left out."""

    def write(self, folder: Path) -> Path:
        """Writes the page, its table and its figure as a report does, and returns the page. Raises UserError."""
        from dflash_mcmc.report.build import write

        drawing = Drawing("fig_differences", f"Differences to {self.table.rows[0]['run']} with 95 % intervals.", self._figure)
        section = Section("comparison", "Compared with the first log", [_METHOD], [self.table], [drawing])
        write(folder, "Paired comparison", [ReportPart("", f"{len(self.table.rows)} logs.", self.notes, [section])], ["pdf"])
        return folder / "report.html"

    def _figure(self) -> figure.Figure:
        base, *rows = self.table.rows
        drawn, (axes,) = figure.panels(figure.rows_size(names := [row["run"] for row in rows]))
        axes.axvline(0.0, color=figure.INK, linewidth=0.8)
        for place, row in enumerate(rows):
            colour = {"better": figure.RIGHT, "worse": figure.WRONG}.get(row["verdict"], figure.OTHER)
            axes.plot([100 * row["difference_low"], 100 * row["difference_high"]], [place, place], color=colour)
            axes.plot([100 * row["difference"]], [place], "o", color=colour)
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.set_xlabel(f"difference to {base['run']} (points), 95 % interval")
        return drawn


def compared(logs: Sequence[Log]) -> Comparison:
    """Compares each log with the first. Raises UserError for fewer than two, and for logs without a problem in common."""
    if len(logs) < 2:
        raise UserError(f"compare: given {len(logs)} log; allowed: at least two, the first of which is the baseline")
    every = [score for log in logs for scores in log.scores.values() for score in scores]
    low, high = min(0.0, *every), max(1.0, *every)  # scores that are no verdicts have a range of their own
    notes = [f"{log.name}: {log.unscored} samples without a score are left out" for log in logs if log.unscored]
    if (low, high) != (0.0, 1.0):
        notes.append(f"scores reach from {low:g} to {high:g}, and are shown as shares of this range")
    outcomes, base, rows = [log.outcomes(low, high) for log in logs], logs[0], list[dict[str, Any]]()
    for log, own in zip(logs, outcomes, strict=True):
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {"run": log.name, "problems": len(own.problems), "samples": int(own.chains.sum()),
                **accuracy_of(own).columns("accuracy")}
        rows.append(row)
        if log is base:
            continue
        one, other, left_out = aligned(own, outcomes[0])
        if not one.problems:
            raise UserError(f"{log.name}: has no problem in common with {base.name}: {own.problems[0]!r}, ... and "
                            f"{outcomes[0].problems[0]!r}, ...; allowed: logs with the same ids of problems")
        if left_out:
            notes.append(f"{log.name}: {left_out} problems are left out, because only one of it and {base.name} has them")
        pair, sides = compare(one, other), np.sign(np.round(one.correct - other.correct, 12))
        row |= {"baseline": base.name, "common": len(one.problems), **differences(pair), "won": int((sides > 0).sum()),
                "lost": int((sides < 0).sum()), "test": pair.test}
        if pair.difference.known and np.ptp(one.correct - other.correct) > 0.0:
            chains = int(max(one.chains.min(), other.chains.min()))
            row["problems_needed"] = VarianceParts.of(one, other).problems_needed(abs(pair.difference.known), chains)
    adjusted(rows)
    return Comparison(ReportTable("comparison", "Paired comparison", {
        "run": "run", "problems": ("problems", "count"), "samples": ("samples", "count"), "accuracy": ("accuracy", "share"),
        "difference (points)": ("difference", "points"), "won": ("won", "count"), "lost": ("lost", "count"), **P_VALUES,
        "verdict": "verdict", "problems needed": ("problems_needed", "count")}, rows), notes)
