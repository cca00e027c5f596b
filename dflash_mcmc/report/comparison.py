"""Paired comparisons of logs with the first of them: `python -m dflash_mcmc.compare`, and `compare` in Python.

Each log is compared on the problems that it shares with the first. Several samples of a problem are one cluster. The tests and
intervals are those of a report (`statistics/paired.py`), and p is adjusted for all comparisons (Holm 1979).
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.errors import UserError, writing
from dflash_mcmc.report.logs import Log
from dflash_mcmc.report.parts import tabulated
from dflash_mcmc.report.sections.paired import VERDICTS
from dflash_mcmc.statistics.outcomes import accuracy_of, aligned
from dflash_mcmc.statistics.paired import VarianceParts, compare, holm, verdict

COLUMNS = ("run", "problems", "samples", "accuracy", "accuracy_low", "accuracy_high", "baseline", "common", "difference",
           "difference_low", "difference_high", "won", "lost", "p", "p_holm", "test", "result", "problems_needed")
"""Accuracies and differences are shares, over problems, with 95 % intervals. `won` and `lost` count the common problems whose
mean is above and below that of the baseline. `problems_needed` detects a difference of this size at p = 0.05 with 80 % power,
with as many chains of a problem as here."""
_METHOD = ("Each log is compared with the first on the problems that both have; the samples of a problem are one cluster. "
           "With one verdict a problem the test is McNemar's exact test, else a permutation of the signs of the differences. "
           "Intervals are Student's over problems, adjusted for few problems (Bonett & Price 2012). p (Holm) is adjusted for "
           "all comparisons; a result is resolved if it is at most 0.05.")
_PAGE = """<!doctype html>
<meta charset="utf-8"><title>Paired comparison</title>
<style>body {{ font: 15px sans-serif; max-width: 75em; margin: 2em auto }} pre {{ overflow-x: auto }}</style>
<h1>Paired comparison</h1>
<img src="differences.svg" alt="Differences to {baseline} with 95 % intervals">
<pre>{table}</pre>
{notes}
"""


class Comparison(NamedTuple):
    """Compared logs."""

    rows: list[dict[str, Any]]
    """A row for each log with the columns of `COLUMNS`; that of the baseline has no difference."""
    notes: list[str]
    """Lines on what was left out."""

    def text(self) -> str:
        """The table for a terminal."""
        headers = ("run", "problems", "samples", "accuracy (%)", "difference (points)", "won", "lost", "p", "p (Holm)",
                   f"against {self.rows[0]['run']}", "problems needed")
        return tabulated(headers, [_cells(row) for row in self.rows], ("left", *["right"] * 8, "left", "right"))

    def write(self, folder: Path) -> Path:
        """Writes comparison.csv, the figure as PNG, SVG and PDF, and the page that shows them, which is returned.

        Raises UserError if they cannot be written.
        """
        import pandas as pd

        from dflash_mcmc.report import figure

        page, notes = folder / "comparison.html", [*self.notes, _METHOD]
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            pd.DataFrame(self.rows, columns=list(COLUMNS)).to_csv(folder / "comparison.csv", index=False)
            with figure.style(math=False):
                figure.save(self._figure(), folder, "differences", ("png", "svg", "pdf"))
            page.write_text(_PAGE.format(baseline=html.escape(self.rows[0]["run"]), table=html.escape(self.text()),
                                         notes="\n".join(f"<p>{html.escape(note)}</p>" for note in notes)))
        return page

    def _figure(self) -> Any:
        from matplotlib.figure import Figure

        from dflash_mcmc.report.figure import INK, OTHER, RIGHT, WRONG, rows_size

        rows = self.rows[1:]
        names = [row["run"] for row in rows]
        made = Figure(rows_size(names), layout="constrained")
        axes = made.subplots()
        axes.axvline(0.0, color=INK, linewidth=0.8)
        for place, row in enumerate(rows):
            colour = {"better": RIGHT, "worse": WRONG}.get(row["result"], OTHER)
            axes.plot([100 * row["difference_low"], 100 * row["difference_high"]], [place, place], color=colour)
            axes.plot([100 * row["difference"]], [place], "o", color=colour)
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.set_xlabel(f"difference to {self.rows[0]['run']} (points), 95 % interval")
        return made


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
        row |= {"run": log.name, "problems": len(own.problems), "samples": int(own.chains.sum()), "result": "",
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
        chains, varies = int(max(one.chains.min(), other.chains.min())), np.ptp(one.correct - other.correct) > 0.0
        needed = None
        if pair.difference.known and varies:
            needed = VarianceParts.of(one, other).problems_needed(abs(pair.difference.known), chains)
        row |= {"baseline": base.name, "common": len(one.problems), **pair.difference.columns("difference"),
                "won": int((sides > 0).sum()), "lost": int((sides < 0).sum()), "p": pair.p_value, "test": pair.test,
                "problems_needed": needed}
    for row, p in zip(rows[1:], holm([row["p"] for row in rows[1:]]), strict=True):
        row["p_holm"], row["result"] = p, VERDICTS[verdict(row["difference"], p)]
    return Comparison(rows, notes)


def _cells(row: dict[str, Any]) -> list[str]:
    def interval(name: str, sign: str) -> str:
        value, low, high = (100 * row[f"{name}{end}"] for end in ("", "_low", "_high"))
        return f"{value:{sign}.1f} [{low:.1f}, {high:.1f}]"

    own = [row["run"], str(row["problems"]), str(row["samples"]), interval("accuracy", "")]
    if row["baseline"] is None:
        return [*own, *[""] * 7]
    needed = "" if row["problems_needed"] is None else f"{row['problems_needed']:,}"
    return [*own, interval("difference", "+"), str(row["won"]), str(row["lost"]), f"{row['p']:.2g}", f"{row['p_holm']:.2g}",
            row["result"], needed]
