"""Accuracy against the cost of an answer, and the Pareto front."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_mcmc.report.parts import Column, Drawing, Section, Table, accurate, named, paragraphs, shared
from dflash_mcmc.report.study import Entry, Study, cost_of
from dflash_mcmc.statistics.summaries import TIMES, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dflash_mcmc.statistics.outcomes import Cost

_COSTS: dict[Cost, str] = {"token_forwards": "token-forwards per answer", "share_seconds": "device seconds per answer"}
_TEXT = """
Token-forwards are the positions that the target evaluates for an answer: prompt, recomputed prefixes and drawn tokens. Device
seconds are the answer's share of the engine's time in its batch. Prefill and draw are their two parts: reading prompts and
prefixes, and everything else. The grader works beside the engine; its seconds are no part of the device seconds. Seconds to
the answer are the time from its start to its end, while other answers run in the same batch. A vote costs the sum of its
chains; its seconds to the answer are those of its slowest chain. A dash means that the seconds were not measured: engine=vllm
measures no prefill, and a vote has no parts of its own.

A finished run is on the Pareto front if no other run is at least as accurate at a lower cost, or more accurate at the same
cost. The front uses the measured accuracies; neighbouring points may differ by chance. It includes only the
largest group of runs over the same problems, because accuracies over different problems are not comparable.
"""


def section(study: Study) -> Section:
    """One row per run and per vote."""
    rows = [_row(entry) for entry in study.entries]
    problems = Counter(frozenset(entry.outcomes.problems) for entry in study.entries if entry.run.complete)
    largest = max(problems, key=lambda found: (problems[found], len(found)), default=frozenset())
    for row, entry in zip(rows, study.entries, strict=True):
        row["comparable"] = entry.run.complete and frozenset(entry.outcomes.problems) == largest
    for cost in _COSTS:
        for row in rows:
            row[f"front_{cost}"] = _on_front(row, rows, cost)
    return Section("cost", "Accuracy against cost", paragraphs(_TEXT),
                   [Table("cost", "Cost of an answer", _columns(), rows)],
                   [Drawing("fig_pareto", "Accuracy against the cost of an answer, with the Pareto front.",
                            lambda: _figure(study, rows))])


def _row(entry: Entry) -> dict:
    names: tuple[Cost, ...] = (*_COSTS, "seconds")
    costs = {name: cost_of(entry.records, name) for name in names}
    split = {} if entry.voted else times(entry.run.records)  # a vote has no times of its own
    parts = {f"{part}_seconds": split.get(f"mean_{part}_seconds") for part in TIMES}
    return {"run": entry.shown, **accurate(entry.accuracy), **costs, **parts, "complete": entry.run.complete}


def _on_front(row: dict, rows: Sequence[dict], cost: str) -> bool:
    """Whether a row is comparable and no other comparable row is better. `section` sets `comparable` in each row."""
    return row["comparable"] and not any(
        other["comparable"] and other[cost] <= row[cost] and other["accuracy"] >= row["accuracy"]
        and (other[cost] < row[cost] or other["accuracy"] > row["accuracy"]) for other in rows)


def _columns() -> list[Column]:
    def front(header: str, cost: str) -> Column:
        return Column(header, lambda row: "yes" if row[f"front_{cost}"] else "-", number=False)

    def timed(header: str, key: str) -> Column:
        return Column(header, lambda row: "-" if row[key] is None else f"{row[key]:.3g}")

    return [named("run", "run"), shared("accuracy", "accuracy"),
            Column("token-forwards", lambda row: f"{row['token_forwards']:,.0f}"),
            timed("device seconds", "share_seconds"), timed("of them prefill", "prefill_seconds"),
            timed("of them draw", "draw_seconds"), timed("grade seconds", "grade_seconds"),
            timed("seconds to the answer", "seconds"),
            front("on front by token-forwards", "token_forwards"), front("on front by device seconds", "share_seconds")]


def _figure(study: Study, rows: list[dict]) -> Figure:
    """Accuracy over each cost. Points are numbered and named below the panels, since the names do not fit next to them."""
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
    panels[1].set_title("filled points, dashed line: Pareto front; grey: 95 % intervals", fontsize=8.5, fontweight="normal",
                        loc="right")
    drawn.draw_without_rendering()  # positions of points are known only after the layout
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
