"""How figures look and where they go: PNG and SVG, without a display and without pyplot's global state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RIGHT, WRONG, OTHER, INK = "#0072B2", "#D55E00", "#9A9A9A", "#333333"
"""Okabe and Ito's blue and vermilion, which colour-blind readers tell apart too, and two greys."""

_STYLE = {
    "font.size": 9.0, "axes.titlesize": 10.0, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "text.color": INK, "axes.axisbelow": True, "axes.grid": True,
    "grid.color": "#E6E6E6", "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 8.5, "lines.linewidth": 1.6,
    "savefig.dpi": 160, "svg.hashsalt": "dflash_mcmc",  # the same figure is the same file
}


@contextmanager
def style() -> Iterator[None]:
    """Figures that are made and saved inside look alike."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def label_lines(axes: Axes, x: float, labels: list[tuple[str, float, str]]) -> None:
    """Writes (text, y, colour) behind the ends of lines on a logarithmic axis, pushed apart where they would overlap."""
    low, high = np.log10(axes.get_ylim())
    height = axes.get_position().height * axes.figure.get_size_inches()[1] * 72.0
    gap = 11.0 * (high - low) / height  # of 8 points and their leading
    places = [np.log10(max(y, 10.0**low)) for _, y, _ in sorted(labels, key=lambda label: label[1])]
    for n in range(1, len(places)):
        places[n] = max(places[n], places[n - 1] + gap)
    for (text, _, colour), place in zip(sorted(labels, key=lambda label: label[1]), places, strict=True):
        axes.annotate(text, (x, 10.0**place), (5, 0), textcoords="offset points", va="center", fontsize=8, color=colour,
                      annotation_clip=False)


def save(figure: Figure, folder: Path, name: str) -> None:
    """`name.png` and `name.svg` in the folder."""
    figure.savefig(folder / f"{name}.png")
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
