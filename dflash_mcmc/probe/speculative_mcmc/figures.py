"""The figures of the speculative MCMC probe, drawn from its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dflash_mcmc.probe import Summary
from dflash_mcmc.report.figure import INK, OTHER, RIGHT, SKY, WRONG

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINE = "\n"
_SHADES = (SKY, RIGHT, "#003B5C")
"""Colours of the draft's temperatures; the sharpest is the darkest."""


def figures(summary: Summary) -> dict[str, Figure]:
    """`fig_bimodality` and `fig_proposals`; none if nothing was measured."""
    if not summary.tables:
        return {}
    return {"fig_bimodality": _bimodality(summary), "fig_proposals": _overview(summary)}


def _bimodality(summary: Summary) -> Figure:
    """Histograms of the blocks' simulated acceptance. Each proposal has a panel."""
    from matplotlib.figure import Figure

    rows = summary.tables["aggregate"]
    names = list(dict.fromkeys((row["proposal"], row["temperature"]) for row in rows))
    figure = Figure(figsize=(2.9 * len(names), 3.2), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        _histogram(axes, [row for row in summary.data["blocks"] if (row["proposal"], row["temperature"]) == name],
                   summary.number("acceptance_floor"))
        axes.set_title(_label(*name))
    figure.supxlabel("simulated acceptance of a block", fontsize=9)
    figure.axes[0].set_ylabel(f"share of {summary.values['num_blocks']:,} blocks")
    figure.axes[0].legend(loc="upper center")
    return figure


def _histogram(axes: Axes, blocks: list[dict], floor: float) -> None:
    edges = np.linspace(0.0, 1.0, 21).tolist()
    for weights, look in (("joint", {"color": RIGHT, "alpha": 0.55}), ("reference", {"histtype": "step", "color": INK})):
        mine = [row["acceptance"] for row in blocks if row["weights"] == weights]
        if mine:
            axes.hist(mine, edges, weights=np.full(len(mine), 1.0 / len(mine)), label=f"{weights} weights", **look)
    axes.axvline(floor, color=WRONG, linestyle="--", linewidth=1.2, label="floor (stuck chain)")
    axes.set(xlim=(0.0, 1.0))


def _overview(summary: Summary) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 6.6), layout="constrained")
    axes = figure.subplot_mosaic([["tokens", "positions"], ["moves", "speed"]])
    _draw_tokens(axes["tokens"], summary)
    _draw_positions(axes["positions"], summary)
    _draw_moves(axes["moves"], summary)
    _draw_speed(axes["speed"], summary)
    return figure


def _draw_tokens(axes: Axes, summary: Summary) -> None:
    laws = list(dict.fromkeys((row["against"], row["temperature"]) for row in summary.data["token_acceptance"]))
    for number, law in enumerate(laws):
        rows = [row for row in summary.data["token_acceptance"] if (row["against"], row["temperature"]) == law]
        colour, line = (INK, "--") if law[0] == "p" else (_SHADES[(number - 1) % 3], "-")
        axes.plot([row["acceptance"] for row in rows], [row["share"] for row in rows], color=colour, linestyle=line,
                  label=f"{law[0]}, T = {law[1]:g}")
    axes.set(title="Tokens by acceptance 1 - TVD", xlabel="acceptance of a token, upper limit",
             ylabel=f"share of {summary.values['num_predicted_tokens']:,} tokens", xlim=(0, 1), ylim=(0, 1))
    axes.legend(title="draft compared with")


def _draw_positions(axes: Axes, summary: Summary) -> None:
    rows = _of_best_weights(summary.tables["positions"])
    places = list(dict.fromkeys(row["position"] for row in rows))
    names = list(dict.fromkeys((row["proposal"], row["temperature"]) for row in rows))
    for number, name in enumerate(names):
        mine = [row for row in rows if (row["proposal"], row["temperature"]) == name]
        at = np.array([places.index(row["position"]) for row in mine]) + 0.09 * (number - (len(names) - 1) / 2)
        _points(axes, at, mine, "acceptance",
                    WRONG if name[0] == "target" else _SHADES[names.index(name) % 3], _label(*name))
    counts = {row["position"]: row["blocks"] for row in rows}
    axes.set_xticks(range(len(places)), [f"{place}\n{counts[place]:,} blocks" for place in places])
    axes.set(title="Acceptance by position of the block", ylabel="simulated acceptance", ylim=(0, 1.35),
             xlim=(-0.6, len(places) - 0.4))
    axes.legend(ncols=2, loc="upper left")


def _draw_moves(axes: Axes, summary: Summary) -> None:
    rows = _of_best_weights(summary.tables["aggregate"])
    names = [(row["proposal"], row["temperature"]) for row in rows]
    for offset, column, colour in ((-0.2, "acceptance", OTHER), (0.2, "moved", RIGHT)):
        values = [row[column] for row in rows]
        axes.bar(np.arange(len(rows)) + offset, values, 0.4, color=colour, yerr=_errors(rows, column), ecolor=INK, capsize=2,
                 label={"moved": "accepted, different block"}.get(column, "accepted"))
    axes.axhline(summary.number("acceptance_floor"), color=WRONG, linestyle="--", linewidth=1.2, label="floor (stuck chain)")
    axes.set_xticks(range(len(rows)), [_label(*name, between="\n") for name in names])
    axes.set(title="Not every acceptance is a move", ylabel="share of proposals", ylim=(0, 1.3))
    axes.legend(ncols=3, loc="upper left", columnspacing=1.0, handlelength=1.2)


def _draw_speed(axes: Axes, summary: Summary) -> None:
    rows = _of_best_weights(summary.tables.get("throughput", []))
    if not rows:
        axes.text(0.5, 0.5, "no proposals were timed\nwith this probe.timed_rows", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    for offset, column, colour in ((-0.2, "accepts_per_second", OTHER), (0.2, "moves_per_second", RIGHT)):
        axes.bar(np.arange(len(rows)) + offset, [row[column] for row in rows], 0.4, color=colour, yerr=_errors(rows, column),
                 ecolor=INK, capsize=2, label=column.replace("_", " "))
    axes.set_xticks(range(len(rows)), [f"{_label(row['proposal'], row['temperature'], between=_LINE)}\n{row['speed']:.1f}x"
                                      for row in rows])
    axes.set(title="Accepted proposals per second (relative speed below)", ylabel="per second")
    axes.set_ylim(top=1.2 * max(row["accepts_per_second_high"] or row["accepts_per_second"] for row in rows))
    axes.legend(ncols=2, loc="upper left")


def _of_best_weights(rows: list[dict]) -> list[dict]:
    """The rows with joint weights if there are any for the draft, else all rows."""
    joint = [row for row in rows if row["weights"] == "joint"]
    drafts = [row for row in joint if row["proposal"] == "draft"]
    return joint if drafts else rows


def _points(axes: Axes, at: np.ndarray, rows: list[dict], column: str, colour: str, label: str) -> None:
    axes.errorbar(at, [row[column] for row in rows], _errors(rows, column), fmt="o", markersize=4, color=colour, capsize=2,
                  label=label)


def _errors(rows: list[dict], column: str) -> np.ndarray:
    """Distances to the lower and upper ends of the intervals, (2, rows); 0 without an interval."""
    def length(row: dict, end: str) -> float:
        return 0.0 if row[f"{column}_{end}"] is None else abs(row[f"{column}_{end}"] - row[column])

    return np.array([[length(row, end) for row in rows] for end in ("low", "high")])




def _label(proposal: str, temperature: float | None, between: str = ", ") -> str:
    return f"target{between}T = 1/alpha" if proposal == "target" else f"draft{between}T = {temperature:g}"
