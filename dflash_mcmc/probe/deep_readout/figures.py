"""The figures of the document `deep_readout_diagnostic`: ranks, from the rows of the tables, and a diagram of both models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from dflash_mcmc.probe.deep_readout.tables import BUCKETS, MODES, PROMPT_AGAIN, REINJECT, TARGET
from dflash_mcmc.report.figure import INK, ORANGE, OTHER, RIGHT, WRONG, bars_of, end_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dflash_mcmc.probe.deep_readout.tables import ParameterCounts


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


def buckets(table: list[dict]) -> Figure:
    """Mean ranks by the target's probability of the token, for all ranges with tokens. `table` is the table `confidence`."""
    figure = Figure(figsize=(8.5, 4.0), layout="constrained")
    axes, columns = figure.subplots(), ("mean_rank_target", "mean_rank_draft")
    readers = (TARGET, *dict.fromkeys(row["mode"] for row in table))
    width = 0.8 / len(readers)
    rows = {(row["p_target"], row["mode"]): row for row in table if row["n"]}
    names = [name for name, *_ in BUCKETS if (name, MODES[0]) in rows]
    for index, reader in enumerate(readers):
        column = columns[reader != TARGET]
        of_reader = [rows[name, MODES[0] if reader == TARGET else reader] for name in names]
        xs = [x + (index - (len(readers) - 1) / 2) * width for x in range(len(of_reader))]
        look, heights = LOOKS[reader], [row[column] for row in of_reader]
        axes.bar(xs, heights, width, color=look.colour, edgecolor="white", hatch=look.hatch, label=look.name,
                 yerr=bars_of(of_reader, column), ecolor=INK, error_kw={"linewidth": 0.9})
        for x, height in zip(xs, heights, strict=True):
            axes.annotate(_short(height), (x, height), (-1, 1.5), textcoords="offset points", ha="right", va="bottom",
                          fontsize=7, rotation=90)
    axes.set(title="Rank of the token by the target's probability", xlabel="target's probability of the token",
             ylabel="mean rank")
    _log_ranks(axes, 0.8, 4.0 * max(end_of(row, column, "high") for row in rows.values() for column in columns))
    axes.set_xticks(range(len(names)), [f"{name}\nn = {rows[name, MODES[0]]['n']:,}" for name in names])
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def decomposition(table: list[dict]) -> Figure:
    """The mean rank with noise, with each added signal, and of the target. `table` is the table `decomposition`.

    Bars go from the rank before an added signal to the rank after it; a bar is hatched if the rank gets worse.
    """
    panels = list(dict.fromkeys(row["tokens"] for row in table if row["n"]))
    figure = Figure(figsize=(5.0 * len(panels), 4.2), layout="constrained")
    for axes, tokens in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        rows = {row["component"]: row for row in table if row["tokens"] == tokens}
        axes.set(title=f"{'All tokens' if tokens == 'all' else tokens.replace('p_target', 'Target p')} "
                       f"(n = {rows[TARGET]['n']:,})", ylabel="mean rank")
        again = [("+ prompt's\nfeatures again", PROMPT_AGAIN, "+ features")] if PROMPT_AGAIN in rows else []
        steps = (("noise", "random baseline", None), ("+ features\n(masks)", "+ features", "random baseline"),
                 ("+ gold\ntokens", "+ gold tokens", "+ features"), *again, ("target\n(from noise)", TARGET, None))
        chance = rows["chance"]["mean_rank"]
        bottom = 0.6 * min(end_of(row, "mean_rank", "low") for row in rows.values())
        _log_ranks(axes, bottom, 3.0 * max(end_of(row, "mean_rank", "high") for row in rows.values()))
        for x, (_, component, before) in enumerate(steps):
            row = rows[component]
            reached, start = row["mean_rank"], bottom if before is None else rows[before]["mean_rank"]
            worse = before is not None and reached > start
            colour = INK if component == TARGET else OTHER if before is None else WRONG if worse else RIGHT
            axes.bar(x, reached - start, 0.62, bottom=start, color=colour, hatch="//" if worse else "", edgecolor="white")
            axes.errorbar(x, reached, yerr=bars_of([row], "mean_rank"), color=INK, linewidth=0.9, capsize=2.5, fmt="none")
            size = max(row["factor"], 1.0 / row["factor"])
            factor = (f"{size:,.0f}x" if size >= 100.0 else f"{size:.1f}x") + (" better" if row["factor"] >= 1.0 else " worse")
            axes.annotate(_short(reached) + ("" if component == "random baseline" else f"\n{factor}"),
                          (x, max(start, end_of(row, "mean_rank", "high"))), (0, 3),
                          textcoords="offset points", ha="center", va="bottom", fontsize=8)
            if x < 2:
                axes.plot([x + 0.31, x + 0.69], [reached, reached], color=INK, linewidth=0.7, linestyle=":")
        axes.axhline(chance, color=OTHER, linestyle="--", linewidth=1.0)
        axes.annotate(f"chance: {_short(chance)}", (len(steps) - 0.6, chance), (0, 2), textcoords="offset points", ha="right",
                      va="bottom", fontsize=8)
        axes.set_xticks(range(len(steps)), [name for name, *_ in steps])
        axes.grid(visible=False, axis="x")
    return figure


def by_block(curves: list[dict], context: str) -> Figure:
    """Ranks by block number. `curves` is the table `block_curves`."""
    groups = {(row["first_block"], row["last_block"]): row["n"] for row in curves}
    ticks = [f"{first if first == last else f'{first}-{last}'}\n{n:,}" for (first, last), n in groups.items()]
    return _two_panels(curves, ("mean_rank", "geometric_mean_rank"), list(range(len(groups))), ticks, xlabel="block",
                       title=f"Rank by block. The draft sees {_SHOWN[context]}")


def by_position(curves: list[dict], context: str) -> Figure:
    """Rank and probability by the number of positions before the block. `curves` is the table `position_curves`."""
    bins = {(row["from"], row["to_below"]): row["n"] for row in curves}
    ticks = [f"{low:,}-{high - 1:,}\n{n:,}" for (low, high), n in bins.items()]
    middles = [math.sqrt(low * high) for low, high in bins]
    return _two_panels(curves, ("geometric_mean_rank", "mean_p"), middles, ticks, xlabel="positions before the block",
                       xscale="log", title=f"Rank by context length. The draft sees {_SHOWN[context]}")


_CROWDED = 80
"""Tick labels are slanted if they have at least this many letters in total."""
_TITLES = {"mean_rank": "mean rank (sensitive to outliers)", "geometric_mean_rank": "geometric mean of ranks",
           "mean_p": "mean probability of the token"}


def _two_panels(curves: list[dict], columns: tuple[str, str], places: list[float], ticks: list[str], title: str,
                **axis: str) -> Figure:
    """A panel per column, with a line per reader and its interval as a band."""
    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axes, column in zip(figure.subplots(1, 2), columns, strict=True):
        for reader in dict.fromkeys(row["reader"] for row in curves):
            rows, look = [row for row in curves if row["reader"] == reader], LOOKS[reader]
            lows, highs = ([end_of(row, column, end) for row in rows] for end in ("low", "high"))
            axes.plot(places, [row[column] for row in rows], look.line, marker=look.marker, markersize=4.5, color=look.colour,
                      label=look.name if column == columns[0] else None)
            axes.fill_between(places, lows, highs, color=look.colour, alpha=0.18, linewidth=0)
        axes.set(ylabel=_TITLES[column], **axis)
        if column == "mean_p":
            axes.set_ylim(0.0, 1.0)
        else:
            _log_ranks(axes, 0.9, 1.2 * max(end_of(row, column, "high") for row in curves))
        axes.xaxis.set_minor_locator(NullLocator())
        if sum(max(map(len, tick.split("\n"))) for tick in ticks) < _CROWDED:
            axes.set_xticks(places, ticks, fontsize=7)
            axes.annotate("n", (0, 0), (-14, -18), xycoords="axes fraction", textcoords="offset points", fontsize=7)
        else:
            axes.set_xticks(places, [tick.replace("\n", ", n = ") for tick in ticks], fontsize=7, rotation=40, ha="right",
                            rotation_mode="anchor")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def _log_ranks(axes: Axes, bottom: float, top: float) -> None:
    """Sets a logarithmic axis of ranks with plain numbers."""
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if top / bottom > 300.0 else (1.0, 2.0, 5.0), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def architecture(counts: ParameterCounts) -> Figure:
    """The diagram of target and draft, side by side. It shows tapped layers, the compression, and shared parts.

    The picture is 10 by 10, with the target's layers from the bottom on the left and the draft's on the right.

    Args:
        counts: see `readout.count_parameters`.
    """
    figure = Figure(figsize=(9.5, 6.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0.0, 10.0), ylim=(0.0, 10.0))
    axes.set_axis_off()
    axes.set_title("The draft reads the target's layers and shares its embedding and head")
    bottom, top, above, pale = 1.6, 8.2, 8.62, "#DCEAF5"
    target_left, target_width, draft_left, draft_width = 0.6, 2.6, 6.9, 2.2
    # The embedding below and the head above both stacks of layers.
    middle = (target_left + draft_left + draft_width) / 2
    head = "same weights as the embedding" if counts["tied"] else f"{_millions(counts['head'])} parameters"
    for y, text in ((0.3, f"embedding, shared: {_millions(counts['embedding'])} parameters"), (9.0, f"head, shared: {head}")):
        axes.add_patch(Rectangle((target_left, y), draft_left + draft_width - target_left, 0.6, facecolor="#EFEFEF",
                                 edgecolor=INK, linewidth=0.8))
        axes.text(middle, y + 0.3, text, ha="center", va="center", fontsize=9)
    for x, fed in ((target_left + target_width / 2, "all tokens"), (draft_left + draft_width / 2, "known token, masks")):
        _arrow(axes, (x, 0.9), (x, bottom))
        _arrow(axes, (x, top), (x, 9.0))
        axes.text(x - 0.1, 1.25, fed, ha="right", va="center", fontsize=8)
    # The target's layers; those that the draft reads are filled.
    num_layers, tapped = counts["num_target_layers"], []
    height = (top - bottom) / num_layers
    for layer in range(num_layers):
        y, reads = bottom + layer * height, layer in counts["tapped_layers"]
        axes.add_patch(Rectangle((target_left, y + 0.08 * height), target_width, 0.84 * height, linewidth=0.6,
                                 facecolor=RIGHT if reads else "white", edgecolor=INK))
        if reads:
            tapped.append(y + height / 2)
            axes.text(target_left - 0.1, y + height / 2, str(layer), ha="right", va="center", fontsize=7.5, color=INK)
    axes.text(target_left + target_width / 2 + 0.12, above, f"target: {num_layers} layers\n"
              f"{_millions(counts['target_layers'])} parameters", ha="left", va="center", fontsize=9)
    # The path of the features from these layers through the compression to every layer of the draft.
    hidden, num_layers, middle = counts["hidden_size"], counts["num_draft_layers"], (bottom + top) / 2
    for y in tapped:
        axes.plot([target_left + target_width, 4.3], [y, middle + (y - middle) * 0.35], color=RIGHT, linewidth=1.1)
    axes.add_patch(Polygon([(4.3, middle - 1.4), (4.3, middle + 1.4), (5.2, middle + 0.4), (5.2, middle - 0.4)],
                           facecolor=pale, edgecolor=INK, linewidth=0.8))
    axes.text(4.7, middle, "fc", ha="center", va="center", fontsize=10)
    axes.text(4.75, middle - 1.55, f"{hidden * len(counts['tapped_layers']):,} to {hidden:,}\n"
              f"{_millions(counts['draft_fc'])} parameters\nno nonlinearity", ha="center", va="top", fontsize=8.5)
    height = (top - bottom) / num_layers
    for layer in range(num_layers):
        y = bottom + layer * height
        axes.add_patch(Rectangle((draft_left, y + 0.05 * height), draft_width, 0.9 * height, linewidth=0.8, facecolor=pale,
                                 edgecolor=INK))
        axes.text(draft_left + draft_width / 2, y + height / 2, f"layer {layer}", ha="center", va="center", fontsize=8)
        _arrow(axes, (5.2, middle), (draft_left, y + height / 2), RIGHT)
    axes.text(draft_left + draft_width / 2 - 0.12, above, f"draft: {num_layers} layers\n"
              f"{_millions(counts['draft_layers'])} parameters, {counts['draft_layers'] / counts['target_layers']:.1%} of the "
              "target's", ha="right", va="center", fontsize=9)
    axes.text(draft_left - 0.12, bottom + 0.15, "keys and values\nof the context", ha="right", va="bottom", fontsize=8,
              color=RIGHT)
    return figure


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = OTHER) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=colour, linewidth=1.0,
                                   shrinkA=0, shrinkB=0))


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number / 1e3:,.1f} K"
