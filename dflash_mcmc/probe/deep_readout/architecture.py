"""The diagram of target and draft in the document `deep_readout_diagnostic`, drawn from their parameter counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle

from dflash_mcmc.report.figure import INK, OTHER, RIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dflash_mcmc.probe.deep_readout.parameters import ParameterCounts

_TARGET, _DRAFT = (0.6, 2.6), (6.9, 2.2)
"""Left edge and width of the two stacks of layers."""
_BOTTOM, _TOP, _ABOVE = 1.6, 8.2, 8.62
"""Vertical positions in a picture of 10 by 10: the bottom and the top of the stacks, and the names above them."""
_PALE = "#DCEAF5"


def architecture(counts: ParameterCounts) -> Figure:
    """The diagram of target and draft, side by side. It shows tapped layers, the compression, and shared parts.

    Args:
        counts: see `parameters.count_parameters`.
    """
    figure = Figure(figsize=(9.5, 6.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0.0, 10.0), ylim=(0.0, 10.0))
    axes.set_axis_off()
    axes.set_title("The draft reads the target's layers and shares its embedding and head")
    _draw_shared(axes, counts)
    tapped = _draw_target(axes, counts)
    _draw_draft(axes, counts, tapped)
    return figure


def _draw_shared(axes: Axes, counts: ParameterCounts) -> None:
    """Draws the embedding below and the head above both stacks."""
    left, right = _TARGET[0], _DRAFT[0] + _DRAFT[1]
    head = "same weights as the embedding" if counts["tied"] else f"{_short(counts['head'])} parameters"
    for y, text in ((0.3, f"embedding, shared: {_short(counts['embedding'])} parameters"), (9.0, f"head, shared: {head}")):
        axes.add_patch(Rectangle((left, y), right - left, 0.6, facecolor="#EFEFEF", edgecolor=INK, linewidth=0.8))
        axes.text((left + right) / 2, y + 0.3, text, ha="center", va="center", fontsize=9)
    for (start, width), fed in ((_TARGET, "all tokens"), (_DRAFT, "known token, masks")):
        x = start + width / 2
        _arrow(axes, (x, 0.9), (x, _BOTTOM))
        _arrow(axes, (x, _TOP), (x, 9.0))
        axes.text(x - 0.1, 1.25, fed, ha="right", va="center", fontsize=8)


def _draw_target(axes: Axes, counts: ParameterCounts) -> list[float]:
    """Draws the target's layers from the bottom; returns the heights of the tapped layers."""
    number, tapped = counts["num_target_layers"], set(counts["tapped_layers"])
    left, width = _TARGET
    height, middles = (_TOP - _BOTTOM) / number, []
    for layer in range(number):
        y = _BOTTOM + layer * height
        axes.add_patch(Rectangle((left, y + 0.08 * height), width, 0.84 * height, linewidth=0.6,
                                 facecolor=RIGHT if layer in tapped else "white", edgecolor=INK))
        if layer in tapped:
            middles.append(y + height / 2)
            axes.text(left - 0.1, y + height / 2, str(layer), ha="right", va="center", fontsize=7.5, color=INK)
    axes.text(left + width / 2 + 0.12, _ABOVE, f"target: {number} layers\n{_short(counts['target_layers'])} parameters",
              ha="left", va="center", fontsize=9)
    return middles


def _draw_draft(axes: Axes, counts: ParameterCounts, tapped: list[float]) -> None:
    """Draws the features' path from the tapped layers through the compression to every layer of the draft."""
    hidden, number = counts["hidden_size"], counts["num_draft_layers"]
    wide, middle = hidden * len(counts["tapped_layers"]), (_BOTTOM + _TOP) / 2
    for y in tapped:
        axes.plot([_TARGET[0] + _TARGET[1], 4.3], [y, middle + (y - middle) * 0.35], color=RIGHT, linewidth=1.1)
    axes.add_patch(Polygon([(4.3, middle - 1.4), (4.3, middle + 1.4), (5.2, middle + 0.4), (5.2, middle - 0.4)],
                           facecolor=_PALE, edgecolor=INK, linewidth=0.8))
    axes.text(4.7, middle, "fc", ha="center", va="center", fontsize=10)
    axes.text(4.75, middle - 1.55, f"{wide:,} to {hidden:,}\n{_short(counts['draft_fc'])} parameters\nno nonlinearity",
              ha="center", va="top", fontsize=8.5)
    left, width = _DRAFT
    height = (_TOP - _BOTTOM) / number
    for layer in range(number):
        y = _BOTTOM + layer * height
        axes.add_patch(Rectangle((left, y + 0.05 * height), width, 0.9 * height, linewidth=0.8, facecolor=_PALE,
                                 edgecolor=INK))
        axes.text(left + width / 2, y + height / 2, f"layer {layer}", ha="center", va="center", fontsize=8)
        _arrow(axes, (5.2, middle), (left, y + height / 2), RIGHT)
    share = counts["draft_layers"] / counts["target_layers"]
    axes.text(left + width / 2 - 0.12, _ABOVE, f"draft: {number} layers\n{_short(counts['draft_layers'])} parameters, "
              f"{share:.1%} of the target's", ha="right", va="center", fontsize=9)
    axes.text(left - 0.12, _BOTTOM + 0.15, "keys and values\nof the context", ha="right", va="bottom", fontsize=8, color=RIGHT)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = OTHER) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=colour, linewidth=1.0,
                                   shrinkA=0, shrinkB=0))


def _short(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number / 1e3:,.1f} K"
