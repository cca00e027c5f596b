"""The figure of the probe, drawn from the rows of its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from dflash_mcmc.probe.adaptation.walks import FROZEN
from dflash_mcmc.report.figure import INK, MARKERS, PALETTE, RIGHT, WRONG, rows_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = 6
"""Settings with a line in the first panel: those with the highest tau. More lines cannot be told apart."""


def adaptation(settings: list[dict], positions: list[dict]) -> Figure:
    """tau by position in the answer, and the change of tau and of log q against the frozen draft in every setting."""
    learned = [row for row in settings if row["setting"] != FROZEN]
    height = max(4.4, rows_size([row["setting"] for row in learned])[1] + 1.2)
    figure = Figure(figsize=(15.0, height), layout="constrained")
    first, second, third = figure.subplots(1, 3, width_ratios=(1.2, 1.0, 1.0))
    best = sorted(learned, key=lambda row: -row["tau"])[:_LINES]
    _by_position(first, positions, [FROZEN, *(row["setting"] for row in best)])
    first.set_title("Tokens for each forward, by position")
    for axes, column, title, label in (
            (second, "tau_change", "Change of tau", "change of tokens for each forward"),
            (third, "log_q_change", "Change of log q of the answer's tokens", "change of the mean log q, in nats")):
        _changes(axes, learned, column)
        axes.set(title=title, xlabel=label)
    third.set_yticklabels([])
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower left", ncols=2, fontsize=7.5)
    return figure


def _by_position(axes: Axes, positions: list[dict], shown: list[str]) -> None:
    ranges = list(dict.fromkeys((row["from"], row["to_below"]) for row in positions))
    aside = 0.5 / len(shown)
    for number, name in enumerate(shown):
        rows = {(row["from"], row["to_below"]): row for row in positions if row["setting"] == name}
        places = [place for place, each in enumerate(ranges) if each in rows]
        found = [rows[ranges[place]] for place in places]
        reach = [[row["tau"] - row["tau_low"] if row["tau_low"] is not None else 0.0 for row in found],
                 [row["tau_high"] - row["tau"] if row["tau_high"] is not None else 0.0 for row in found]]
        colour = INK if name == FROZEN else PALETTE[(number - 1) % (len(PALETTE) - 1)]
        axes.errorbar([place + (number - len(shown) / 2) * aside for place in places], [row["tau"] for row in found], reach,
                      color=colour, marker=MARKERS[number % len(MARKERS)], markersize=4.5, linestyle="-" if number else "--",
                      linewidth=1.2, elinewidth=0.9, capsize=2.0, label=name)
    blocks = {(row["from"], row["to_below"]): row["blocks"] for row in positions if row["setting"] == FROZEN}
    axes.set_xticks(range(len(ranges)), [f"{low}-{high - 1 if high else ''}\n{blocks.get((low, high), 0):,} blocks"
                                         for low, high in ranges], fontsize=7.5)
    axes.set(xlabel="token of the answer at which the block begins", ylabel="tau, tokens for each forward of the target")


def _changes(axes: Axes, rows: list[dict], column: str) -> None:
    for place, row in enumerate(rows):
        low, high = row[f"{column}_low"], row[f"{column}_high"]
        colour = INK if low is None or low <= 0.0 <= high else RIGHT if low > 0.0 else WRONG
        if low is not None:
            axes.plot([low, high], [place, place], color=colour, linewidth=2.0, alpha=0.6, solid_capstyle="butt")
        axes.plot(row[column], place, MARKERS[0], color=colour, markersize=5.5)
    axes.axvline(0.0, color=INK, linewidth=0.9)
    axes.set_yticks(range(len(rows)), [row["setting"] for row in rows], fontsize=7.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
