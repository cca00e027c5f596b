"""A diagram of the sampler with the settings of one run (section 2.4 of the guided-power-sampling document)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.config.labels import followed
from dflash_mcmc.report.parts import Drawing, Section, paragraphs
from dflash_mcmc.report.runs import Run, blended_layers
from dflash_mcmc.report.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
_TEXT = """
The diagram shows the settings of {run}. A sequence grows block by block. In each step a proposal redraws a random suffix, and
the Metropolis-Hastings rule accepts the proposal or keeps the sequence.
"""


def section(study: Study) -> Section | None:
    """The diagram of the first `power_mh` run with a blend, else of the first `power_mh` run. None without such a run."""
    samplers = [run for run in study.runs if run.component("sampler") == "power_mh"]
    if not samplers:
        return None
    run = next((run for run in samplers if run.component("blend") != "none"), samplers[0])
    return Section("setting", "How samples are drawn", paragraphs(_TEXT.format(run=run.label)), (),
                   [Drawing(f"fig_{study.dataset}_architecture", f"How {run.label} draws a sample.", lambda: _figure(run))])


def _figure(run: Run) -> Figure:
    from matplotlib.figure import Figure

    from dflash_mcmc.report.figure import INK, OTHER, RIGHT, WRONG

    blend, matched = run.component("blend"), run.identity.get("sampler.proposal") == "matched"
    drawn = Figure(figsize=(9.2, 4.1))
    axes = drawn.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 48)
    law = r"$p^{\,\alpha}$" if blend == "none" else r"$p_{\mathrm{guided}}^{\,\alpha}$"
    target = _box(axes, 13, 35, "target model\nlogits of the last layer", RIGHT)
    kernel = _box(axes, 77, 24, f"Metropolis-Hastings on {law}\nα = {_number(run, 'sampler.alpha')}, "
                  f"{_number(run, 'sampler.num_blocks')} blocks,\n{_number(run, 'sampler.num_steps')} steps per block", RIGHT)
    kernel.set_parse_math(True)  # its text has no name of a run
    proposal = _box(axes, 77, 42, f"proposal: a redrawn suffix\nat temperature {_temperature(run)}", OTHER)
    answer = _box(axes, 77, 6, "sequence of tokens,\ngraded answer", INK)
    if blend == "none":
        _arrow(axes, target, kernel)
        _arrow(axes, target, proposal)
    else:
        layer = f"{blended_layers(run)}\nthrough the same head"
        other = layer if blend == "layer" else f"{blend}\nblock by block"
        mixed = _box(axes, 43, 24, f"blend\n(1 - β) target + β other\nβ = {_number(run, 'blend.beta')}", INK)
        _arrow(axes, target, mixed)
        _arrow(axes, _box(axes, 13, 13, other, WRONG), mixed)
        _arrow(axes, mixed, kernel)
        _arrow(axes, mixed if matched else target, proposal)
    _arrow(axes, proposal, kernel, "<|-|>", "each step: propose, accept or keep")
    _arrow(axes, kernel, answer, "-|>", "after the last block")
    return drawn


def _number(run: Run, key: str) -> str:
    value = run.identity.get(key)
    return "?" if value is None else f"{value:g}"


def _temperature(run: Run) -> str:
    follows = followed(run.identity).get("sampler.proposal_temperature") == "1/alpha"
    return ("1/α = " if follows else "") + _number(run, "sampler.proposal_temperature")


def _box(axes: Axes, x: float, y: float, text: str, colour: str) -> Text:
    return axes.text(x, y, text, ha="center", va="center", fontsize=9.5, linespacing=1.35, zorder=3,
                     bbox={"boxstyle": "round,pad=0.6", "linewidth": 1.3, "facecolor": "white", "edgecolor": colour})


def _arrow(axes: Axes, start: Text, end: Text, style: str = "-|>", label: str = "") -> None:
    """Draws an arrow between the edges of two boxes, with a label next to it."""
    from dflash_mcmc.report.figure import INK

    axes.annotate("", end.get_position(), start.get_position(), arrowprops={
        "arrowstyle": style, "linewidth": 1.2, "color": INK, "patchA": start.get_bbox_patch(), "patchB": end.get_bbox_patch(),
        "shrinkA": 3, "shrinkB": 3})
    (x, y), (end_x, end_y) = start.get_position(), end.get_position()
    axes.annotate(label, ((x + end_x) / 2, (y + end_y) / 2), (6, 0), textcoords="offset points", fontsize=8, va="center")
