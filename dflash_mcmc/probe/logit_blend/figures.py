"""Figures of the logit blend probe: mean gains over sources and betas, and wins of a few sources by beta."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dflash_mcmc.report.figure import GREEN, INK, ORANGE, OTHER, PURPLE, RIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_COLOURS = (RIGHT, GREEN, PURPLE)
"""Colours of the layers."""
_LINEAR = 0.01
"""End of the linear part of the colour scale, in nats. The rest is logarithmic, because raw layers lose tens of nats."""


def gains(tables: dict[str, list[dict]]) -> Figure:
    """Mean gain of each source (rows) and beta (columns), one panel per table, with the values in the cells."""
    from matplotlib.colors import SymLogNorm
    from matplotlib.figure import Figure

    tables = {title: rows for title, rows in tables.items() if any(row["gain"] is not None for row in rows)}
    largest = max(abs(row["gain"]) for rows in tables.values() for row in rows if row["gain"] is not None)
    scale = SymLogNorm(_LINEAR, vmin=-max(largest, _LINEAR), vmax=max(largest, _LINEAR))
    sources = list(dict.fromkeys(map(_name, next(iter(tables.values())))))
    betas = list(dict.fromkeys(row["beta"] for row in next(iter(tables.values()))))
    width, height = 1.4 + (0.7 * len(betas) + 0.5) * len(tables), 1.3 + 0.26 * len(sources)
    figure = Figure(figsize=(max(width, 7.0), max(height, 3.2)), layout="constrained")
    panels = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (title, rows) in zip(panels, tables.items(), strict=True):
        image = _draw_gains(axes, rows, sources, betas, scale)
        axes.set(title=f"{title} (n = {max(row['n'] for row in rows):,})", xlabel="beta")
    panels[0].set_yticks(range(len(sources)), sources)
    figure.colorbar(image, ax=panels, label="mean gain in log p (nats)", format="{x:g}")
    return figure


def wins(rows: list[dict], title: str, most: int = 3) -> Figure:
    """Shares of tokens that a blend wins, over beta.

    A blend wins a token if it raises the token's log p (left panel) or improves its rank (right panel). The right panel shows
    the share won minus the share lost. There are lines for the draft, the flattened target and `most` layers. These layers
    have the largest shares won by log p at any beta. This selection makes them look better than they would on other tokens.
    """
    from matplotlib.figure import Figure

    by_source: dict[str, list[dict]] = {}
    for row in rows:
        by_source.setdefault(_name(row), []).append(row)
    layers = [name for name, of in by_source.items() if of[0]["source"] == "layer"]
    layers = sorted(layers, key=lambda name: -max(row["wins"] for row in by_source[name]))[:most]
    drawn = {name: (colour, marker) for name, colour, marker in zip(layers, _COLOURS, "osD", strict=False)}
    drawn.update({"draft": (ORANGE, "^"), "flattened": (INK, "x")})
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, column in ((left, "wins"), (right, "rank_wins_minus_losses")):
        for number, (name, (colour, marker)) in enumerate(drawn.items()):
            if name in by_source and by_source[name][0][column] is not None:
                label = f"{name} (n = {by_source[name][0]['n']:,})" if name == "draft" else name
                _draw_line(axes, by_source[name], column, label, colour, marker, number - 2)
        axes.axhline(0.0, color=OTHER, linewidth=0.8)
        betas = [row["beta"] for row in by_source["flattened"]]
        axes.set_xticks(range(len(betas)), [f"{beta:g}" for beta in betas])
        axes.set_xlabel("beta")
    n = by_source["flattened"][0]["n"]
    left.set(title=f"By log p: {title[0].lower()}{title[1:]} (n = {n:,})", ylabel="share of tokens won")
    right.set(title="By rank", ylabel="share won minus share lost")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(drawn))
    return figure


def _name(row: dict) -> str:
    return row["source"] if row["layer"] is None else f"layer {row['layer']}"


def _draw_gains(axes: Axes, rows: list[dict], sources: list[str], betas: list[float], scale: Normalize) -> AxesImage:
    values = {(_name(row), row["beta"]): np.nan if row["gain"] is None else row["gain"] for row in rows}
    grid = np.array([[values[source, beta] for beta in betas] for source in sources])
    image = axes.imshow(grid, cmap="RdBu", norm=scale, aspect="auto")
    for y, x in np.ndindex(*grid.shape):
        if not np.isnan(grid[y, x]):
            strong = abs(float(scale(grid[y, x])) - 0.5) > 0.33
            axes.text(x, y, f"{grid[y, x]:+.2g}", ha="center", va="center", fontsize=7.5, color="white" if strong else "black")
    axes.set_xticks(range(len(betas)), [f"{beta:g}" for beta in betas])
    axes.grid(visible=False)
    return image


def _draw_line(axes: Axes, rows: list[dict], column: str, label: str, colour: str, marker: str, aside: int) -> None:
    values = np.array([row[column] for row in rows])
    reach = None
    if rows[0][f"{column}_low"] is not None:
        reach = np.abs([values - [row[f"{column}_low"] for row in rows], [row[f"{column}_high"] for row in rows] - values])
    axes.errorbar(np.arange(len(rows)) + 0.05 * aside, values, reach, color=colour, marker=marker, markersize=4.5,
                  linewidth=1.2, elinewidth=0.9, capsize=2.0, linestyle="--" if label == "flattened" else "-", label=label)
