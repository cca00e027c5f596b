"""The figure of the probe: frequencies, deviations, and the largest deviation over the number of draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RIGHT_ONE, WRONG_ONE = "speculative_rejection", "speculative_rejection argmax_proposal"
"""The two samplers of the pull request."""


def draw_frequencies(axes: Axes, tokens: list[dict]) -> None:
    """Share of draws of each token, by the right and the wrong sampler of the pull request."""
    from dflash_mcmc.report.figure import INK, RIGHT, WRONG

    places, p = np.arange(len(tokens)), np.array([row["p"] for row in tokens])
    axes.bar(places - 0.27, p, 0.27, color=INK, label="target p")
    axes.bar(places, p + [row[RIGHT_ONE] for row in tokens], 0.27, color=RIGHT, label="proposal drawn from q")
    wrong = p + [row[WRONG_ONE] for row in tokens]
    axes.bar(places + 0.27, wrong, 0.27, color=WRONG, label="proposal: most likely token of q")
    axes.bar(places, [row["q"] for row in tokens], 0.9, fill=False, edgecolor=INK, linewidth=0.8, label="draft q")
    axes.set(title="Share of draws of each token", ylabel="share of draws")
    axes.set_xticks([])


def draw_deviations(axes: Axes, tokens: list[dict], draws: int) -> None:
    """Deviation of these shares from p, with a band of two standard errors."""
    from dflash_mcmc.report.figure import OTHER, RIGHT, WRONG

    places, p = np.arange(len(tokens)), np.array([row["p"] for row in tokens])
    band = 2.0 * np.sqrt(p * (1.0 - p) / draws)
    axes.bar(places, 2.0 * band, 0.9, bottom=-band, color=OTHER, alpha=0.4, label="two standard errors")
    axes.bar(places - 0.2, [row[RIGHT_ONE] for row in tokens], 0.4, color=RIGHT)
    axes.bar(places + 0.2, [row[WRONG_ONE] for row in tokens], 0.4, color=WRONG)
    axes.axhline(0.0, color=OTHER, linewidth=0.6)
    linear = 10.0 ** np.ceil(np.log10(band.max()))
    axes.set_yscale("symlog", linthresh=linear, linscale=1.5)
    axes.set(title="Share of draws minus p", ylabel=f"deviation (linear to {linear:g})", xlabel="token")
    axes.set_xticks(places[:: 1 + len(places) // 25])
    axes.grid(visible=False, axis="x")


def draw_course(figure: Figure, axes: Axes, course: list[dict], names: Sequence[str]) -> None:
    """The largest deviation of any token over the number of draws, a line for each sampler."""
    from dflash_mcmc.report.figure import INK, OTHER, RIGHT, WRONG, label_lines

    draws, labels = [row["draws"] for row in course], []
    for name in names:
        colour = RIGHT if " " not in name else WRONG if name == WRONG_ONE else OTHER
        axes.plot(draws, [row[name] for row in course], color=colour, linewidth=1.2)
        labels.append((name.partition(" ")[2] or name, course[-1][name], colour))
    axes.plot(draws, [row["standard_error"] for row in course], color=INK, linestyle="--", linewidth=1.0)
    labels.append(("standard error", course[-1]["standard_error"], INK))
    axes.set(title="Largest deviation of any token", xlabel="draws", xscale="log", yscale="log")
    label_lines(figure, axes, draws[-1], labels)
