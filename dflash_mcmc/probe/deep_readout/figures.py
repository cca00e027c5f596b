"""The figures of the document `deep_readout_diagnostic`: ranks, from the rows of the tables, and a diagram of both models."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from dflash_mcmc.probe.deep_readout.tables import BUCKETS, MODES, PROMPT_AGAIN, REINJECT, TARGET, ParameterCounts
from dflash_mcmc.report.figure import INK, ORANGE, OTHER, PALE, RIGHT, WRONG, bars_of, end_of, legend_below, panels


class Look(NamedTuple):
    """The style of a reader. Styles differ in more than their colour."""

    name: str
    colour: str
    marker: str
    line: str
    hatch: str


LOOKS = {TARGET: Look("target", INK, "s", "-", ""), "mask": Look("draft, masks", RIGHT, "o", "-", "//"),
         "gold": Look("draft, gold tokens", ORANGE, "^", "--", ".."),
         "random": Look("draft, gold tokens, noise instead of features", OTHER, "x", ":", "xx"),
         REINJECT: Look("draft, masks, prompt's features again", WRONG, "D", "-.", "\\\\")}
_SHOWN = {"full": "all features before a block", "block": "only the features since the previous block",
          "prompt": "only the prompt's features"}
_TITLES = {"mean_rank": "mean rank (sensitive to outliers)", "geometric_mean_rank": "geometric mean of ranks",
           "mean_p": "mean probability of the token"}


def buckets(table: list[dict]) -> Figure:
    """Mean ranks by the target's probability of the token, for all ranges with tokens. `table` is the table `confidence`."""
    figure, (axes,) = panels((8.5, 4.0))
    readers = (TARGET, *dict.fromkeys(row["mode"] for row in table))
    rows, width = {(row["p_target"], row["mode"]): row for row in table if row["n"]}, 0.8 / len(readers)
    names = [name for name, *_ in BUCKETS if (name, MODES[0]) in rows]
    for index, reader in enumerate(readers):
        column, look = "mean_rank_target" if reader == TARGET else "mean_rank_draft", LOOKS[reader]
        mine = [rows[name, MODES[0] if reader == TARGET else reader] for name in names]
        bars = axes.bar(np.arange(len(mine)) + (index - (len(readers) - 1) / 2) * width, [row[column] for row in mine], width,
                        color=look.colour, edgecolor="white", hatch=look.hatch, label=look.name, yerr=bars_of(mine, column),
                        ecolor=INK, error_kw={"linewidth": 0.9})
        axes.bar_label(bars, [_short(row[column]) for row in mine], fontsize=7, rotation=90, padding=2)
    axes.set(title="Rank of the token by the target's probability", xlabel="target's probability of the token",
             ylabel="mean rank")
    _log_ranks(axes)
    axes.set_xticks(range(len(names)), [f"{name}\nn = {rows[name, MODES[0]]['n']:,}" for name in names])
    legend_below(figure, 4)
    return figure


def decomposition(table: list[dict]) -> Figure:
    """The mean rank with noise, with each added signal, and of the target. `table` is the table `decomposition`.

    A bar is hatched if the signal makes the rank worse.
    """
    groups = list(dict.fromkeys(row["tokens"] for row in table if row["n"]))
    figure, places = panels((5.6 * len(groups), 4.2), 1, len(groups))
    for axes, tokens in zip(places, groups, strict=True):
        rows = {row["component"]: row for row in table if row["tokens"] == tokens}
        names = {"random baseline": "noise", "+ features": "+ features\n(masks)", "+ gold tokens": "+ gold\ntokens",
                 PROMPT_AGAIN: "+ prompt's\nfeatures again", TARGET: "target\n(from noise)"}
        mine = [rows[component] for component in names if component in rows]
        axes.set(title=f"{'All tokens' if tokens == 'all' else tokens.replace('p_target', 'Target p')} "
                       f"(n = {rows[TARGET]['n']:,})", ylabel="mean rank")
        for x, row in enumerate(mine):
            worse, size = row["factor"] < 1.0, max(row["factor"], 1.0 / row["factor"])
            colour = {"random baseline": OTHER, TARGET: INK}.get(row["component"], WRONG if worse else RIGHT)
            bar = axes.bar(x, row["mean_rank"], 0.62, color=colour, hatch="//" if worse else "", edgecolor="white",
                           yerr=bars_of([row], "mean_rank"), ecolor=INK, capsize=2.5)
            factor = (f"{size:,.0f}x" if size >= 100.0 else f"{size:.1f}x") + (" worse" if worse else " better")
            axes.bar_label(bar, [_short(row["mean_rank"]) + (f"\n{factor}" if x else "")], fontsize=8, padding=3)
        axes.axhline(chance := rows["chance"]["mean_rank"], color=OTHER, linestyle="--", linewidth=1.0)
        axes.annotate(f"chance: {_short(chance)}", (len(mine) - 0.6, chance), (0, 2), textcoords="offset points", ha="right",
                      va="bottom", fontsize=8)
        _log_ranks(axes)
        axes.set_xticks(range(len(mine)), [names[row["component"]] for row in mine])
    return figure


def by_block(curves: list[dict], context: str) -> Figure:
    """Ranks by block number. `curves` is the table `block_curves`."""
    groups = {(row["first_block"], row["last_block"]): row["n"] for row in curves}
    ticks = [f"{first if first == last else f'{first}-{last}'}\n{n:,}" for (first, last), n in groups.items()]
    return _two_panels(curves, ("mean_rank", "geometric_mean_rank"), list(range(len(groups))), ticks, xlabel="block, n",
                       title=f"Rank by block. The draft sees {_SHOWN[context]}")


def by_position(curves: list[dict], context: str) -> Figure:
    """Rank and probability by the number of positions before the block. `curves` is the table `position_curves`."""
    bins = {(row["from"], row["to_below"]): row["n"] for row in curves}
    ticks = [f"{low:,}-{high - 1:,}\n{n:,}" for (low, high), n in bins.items()]
    return _two_panels(curves, ("geometric_mean_rank", "mean_p"), [math.sqrt(low * high) for low, high in bins], ticks,
                       xlabel="positions before the block, n", xscale="log",
                       title=f"Rank by context length. The draft sees {_SHOWN[context]}")


def _two_panels(curves: list[dict], columns: tuple[str, str], places: list[float], ticks: list[str], title: str,
                **axis: str) -> Figure:
    """A panel per column, with a line per reader and its interval as a band."""
    figure, pair = panels((11.0, 4.6), 1, 2)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axes, column in zip(pair, columns, strict=True):
        for reader in dict.fromkeys(row["reader"] for row in curves):
            rows, look = [row for row in curves if row["reader"] == reader], LOOKS[reader]
            axes.plot(places, [row[column] for row in rows], look.line, marker=look.marker, markersize=4.5, color=look.colour,
                      label=look.name)
            low, high = ([end_of(row, column, end) for row in rows] for end in ("low", "high"))
            axes.fill_between(places, low, high, color=look.colour, alpha=0.18, linewidth=0)
        axes.set(ylabel=_TITLES[column], **axis)
        if column == "mean_p":
            axes.set_ylim(0.0, 1.0)
        else:
            _log_ranks(axes)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(places, ticks, fontsize=7, rotation=40 if len(ticks) > 9 else 0)
    legend_below(figure, 4)
    return figure


def _log_ranks(axes: Axes) -> None:
    """Sets a logarithmic axis of ranks with plain numbers, and room for labels."""
    axes.set_yscale("log")
    axes.margins(y=0.2)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(visible=False, axis="x")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def architecture(counts: ParameterCounts) -> Figure:
    """The diagram of target and draft, side by side. It shows tapped layers, the compression, and shared parts.

    The picture is 10 by 10, with the target's layers from the bottom on the left and the draft's on the right.

    Args:
        counts: see `readout.count_parameters`.
    """
    figure, (axes,) = panels((9.5, 6.2))
    bottom, top, middle, hidden = 1.6, 8.2, 4.9, counts["hidden_size"]
    axes.set(xlim=(0.0, 10.0), ylim=(0.0, 10.0), title="The draft reads the target's layers and shares its embedding and head")
    axes.set_axis_off()

    def box(x: float, y: float, width: float, height: float, colour: str, text: str = "", size: float = 9.0) -> None:
        axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=INK, linewidth=0.7))
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)

    # The embedding below and the head above both stacks of layers.
    head = "same weights as the embedding" if counts["tied"] else f"{_millions(counts['head'])} parameters"
    box(0.6, 0.3, 8.5, 0.6, "#EFEFEF", f"embedding, shared: {_millions(counts['embedding'])} parameters")
    box(0.6, 9.0, 8.5, 0.6, "#EFEFEF", f"head, shared: {head}")
    for x, fed in ((1.9, "all tokens"), (8.0, "known token, masks")):
        for start, end in ((0.9, bottom), (top, 9.0)):
            axes.annotate("", (x, end), (x, start), arrowprops={"arrowstyle": "-|>", "color": OTHER})
        axes.text(x - 0.1, 1.25, fed, ha="right", va="center", fontsize=8)
    # The target's layers, of which the draft reads the filled ones, through the compression, in every layer of its own.
    height = (top - bottom) / counts["num_target_layers"]
    for layer in range(counts["num_target_layers"]):
        y, reads = bottom + layer * height, layer in counts["tapped_layers"]
        box(0.6, y + 0.08 * height, 2.6, 0.84 * height, RIGHT if reads else "white")
        if reads:
            axes.text(0.5, y + height / 2, str(layer), ha="right", va="center", fontsize=7.5)
            axes.plot([3.2, 4.3], [y + height / 2, middle], color=RIGHT, linewidth=1.1)
    box(4.3, middle - 0.9, 0.9, 1.8, PALE, "fc", 10.0)
    axes.text(4.75, middle - 1.05, f"{hidden * len(counts['tapped_layers']):,} to {hidden:,}\n"
              f"{_millions(counts['draft_fc'])} parameters\nno nonlinearity", ha="center", va="top", fontsize=8.5)
    height = (top - bottom) / counts["num_draft_layers"]
    for layer in range(counts["num_draft_layers"]):
        y = bottom + layer * height
        box(6.9, y + 0.05 * height, 2.2, 0.9 * height, PALE, f"layer {layer}", 8.0)
        axes.annotate("", (6.9, y + height / 2), (5.2, middle), arrowprops={"arrowstyle": "-|>", "color": RIGHT})
    share = counts["draft_layers"] / counts["target_layers"]
    for x, side, text in ((2.02, "left", f"target: {counts['num_target_layers']} layers\n{_millions(counts['target_layers'])} "
                           "parameters"), (7.88, "right", f"draft: {counts['num_draft_layers']} layers\n"
                           f"{_millions(counts['draft_layers'])} parameters, {share:.1%} of the target's")):
        axes.text(x, 8.62, text, ha=side, va="center", fontsize=9)
    return figure


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number / 1e3:,.1f} K"
