"""Accuracy against what an answer costs, and which runs nothing else beats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_mcmc.report.parts import Column, Drawing, Section, Table, accurate, named, paragraphs, shared
from dflash_mcmc.report.study import Entry, Study, cost_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COSTS = {"token_forwards": "token-forwards an answer", "share_seconds": "seconds of the device an answer"}
_TEXT = """
Token-forwards are the positions that the target was evaluated at for an answer: prompt, prefixes read again and tokens
drawn. Seconds of the device are an answer's share of the engine's time in its batch, seconds to the answer the time from its
start to its end with the others beside it. A vote costs what all its chains cost; its seconds to the answer are those of the
longest of them.

On the Pareto front are the finished runs that no other equals at a lower cost, or beats at the same. It goes by the
accuracies as they are: neighbours on it may well be ties. Runs stand on it with those over the same problems alone: over
other problems an accuracy is another one. Of several such groups the largest has the front.
"""


def section(study: Study) -> Section:
    """A row for each run and vote."""
    rows = [_row(entry) for entry in study.entries]
    problems = Counter(frozenset(entry.outcomes.problems) for entry in study.entries if entry.run.complete)
    largest = max(problems, key=lambda found: (problems[found], len(found)), default=frozenset())
    for row, entry in zip(rows, study.entries, strict=True):
        row["comparable"] = entry.run.complete and frozenset(entry.outcomes.problems) == largest
    for cost in _COSTS:
        for row in rows:
            row[f"front_{cost}"] = _on_front(row, rows, cost)
    return Section("cost", "Accuracy against cost", paragraphs(_TEXT),
                   [Table("cost", "What an answer costs", _columns(), rows)],
                   [Drawing("fig_pareto", "Accuracy against the cost of an answer, with the Pareto front.",
                            lambda: _figure(study, rows))])


def _row(entry: Entry) -> dict:
    costs = {name: cost_of(entry.records, name) for name in (*_COSTS, "seconds")}
    return {"run": entry.shown, **accurate(entry.accuracy), **costs, "complete": entry.run.complete}


def _on_front(row: dict, rows: Sequence[dict], cost: str) -> bool:
    """Of finished runs over the same problems: a few samples are quickly the best, and so are easy ones."""
    return row["comparable"] and not any(
        other["comparable"] and other[cost] <= row[cost] and other["accuracy"] >= row["accuracy"]
        and (other[cost] < row[cost] or other["accuracy"] > row["accuracy"]) for other in rows)


def _columns() -> list[Column]:
    def front(header: str, cost: str) -> Column:
        return Column(header, lambda row: "yes" if row[f"front_{cost}"] else "-", number=False)

    return [named("run", "run"), shared("accuracy", "accuracy"),
            Column("token-forwards", lambda row: f"{row['token_forwards']:,.0f}"),
            Column("device seconds", lambda row: f"{row['share_seconds']:.3g}"),
            Column("seconds to the answer", lambda row: f"{row['seconds']:.3g}"),
            front("front by forwards", "token_forwards"), front("front by seconds", "share_seconds")]


def _figure(study: Study, rows: list[dict]) -> Figure:
    """Points have numbers, with the names below: names would not fit beside them."""
    from matplotlib.figure import Figure

    from dflash_mcmc.report.figure import label_points

    names = {entry.shown for entry in study.drawn}
    rows = [row for row in rows if row["run"] in names or any(row[f"front_{cost}"] for cost in _COSTS)]
    half = len(rows) if max(len(row["run"]) for row in rows) > 44 else -(-len(rows) // 2)
    drawn = Figure(figsize=(9.2, 3.9 + 0.16 * half), layout="constrained")
    panels = drawn.subplots(1, 2, sharey=True)
    lines = [f"{number}  {row['run']} (n = {row['n']:,})" for number, row in enumerate(rows, start=1)]
    for axes, (cost, name), part in zip(panels, _COSTS.items(), (lines[:half], lines[half:]), strict=True):
        _panel(axes, rows, cost)
        axes.set_xlabel(name)
        axes.annotate("\n".join(part), (0.0, 0.0), (0, -38), xycoords="axes fraction", textcoords="offset points", va="top",
                      fontsize=8, linespacing=1.35)
    panels[0].set_ylabel("correct answers, %")
    panels[0].set_title(f"Accuracy against cost on {study.dataset}")
    panels[1].set_title("filled, dashed: Pareto front; grey: 95 % intervals", fontsize=8.5, fontweight="normal", loc="right")
    drawn.draw_without_rendering()  # where the points are is known only now
    drawn.set_layout_engine("none")
    for axes, cost in zip(panels, _COSTS, strict=True):
        label_points(axes, [(row[cost], 100.0 * row["accuracy"]) for row in rows])
    return drawn


def _panel(axes: Axes, rows: list[dict], cost: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from dflash_mcmc.report.figure import OTHER, RIGHT

    axes.set_xscale("log")
    front = sorted((row[cost], 100.0 * row["accuracy"]) for row in rows if row[f"front_{cost}"])
    axes.step([place for place, _ in front], [height for _, height in front], where="post", color=RIGHT, linewidth=1.2,
              linestyle="--", zorder=2)
    for row in rows:
        axes.plot([row[cost]] * 2, [100.0 * row["accuracy_low"], 100.0 * row["accuracy_high"]], color=OTHER, linewidth=1.0,
                  zorder=1)
        axes.plot(row[cost], 100.0 * row["accuracy"], "o", markersize=6, color=RIGHT, zorder=3,
                  markerfacecolor=RIGHT if row[f"front_{cost}"] else "white")
    axes.margins(x=0.1)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
