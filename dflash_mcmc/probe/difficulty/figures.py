"""The figures of the difficulty probe: AUROC of all signals, ROC curves and calibration of the best ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.difficulty.detection import DRAFT, OTHER, TARGET
from dflash_mcmc.report.figure import INK, RIGHT, WRONG

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS = {DRAFT: (RIGHT, "o", "-"), TARGET: (WRONG, "s", "--"), OTHER: ("#666666", "D", ":")}
"""Colour, marker and line of each kind of signal, distinct in greyscale too."""
_MEANING = {DRAFT: "needs the draft", TARGET: "the target alone", OTHER: "neither"}
_NAMES = {"kl_target_draft": "KL(target || draft)", "kl_draft_target": "KL(draft || target)",
          "minus_log_acceptance": "$-$log acceptance", "top1_disagreement": "top-1 disagreement",
          "num_tokens": "number of tokens", "level": "level of the problem"}


def figures(summary: Summary) -> dict[str, Figure]:
    """The figures by name. A panel without wrong cases or without right cases has a text that states this."""
    return {"fig_difficulty_auroc": _auroc(summary), "fig_difficulty_roc": _roc(summary),
            "fig_difficulty_reliability": _reliability(summary)}


def _panels(summary: Summary, size: tuple[float, float]) -> tuple[Figure, list[tuple[str, Axes]]]:
    """A figure with a panel for answers and one for steps, and the panels that have data."""
    from matplotlib.figure import Figure

    figure, drawn = Figure(figsize=size, layout="constrained"), []
    for name, axes in zip(("answers", "steps"), figure.subplots(1, 2, sharex=True, sharey=True), strict=True):
        (row,) = [row for row in summary.tables["outcomes"] if row["cases"] == name]
        axes.set_title(f"{name.capitalize()}: {row['wrong']} wrong of {row['n']}")
        if 0 < row["wrong"] < row["n"]:
            drawn.append((name, axes))
        else:
            missing = "no case" if not row["n"] else "all are right" if not row["wrong"] else "all are wrong"
            _say(axes, f"{missing}, so there is no AUROC")
    return figure, drawn


def _say(axes: Axes, text: str) -> None:
    """Writes a text into a panel that has no data."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
    axes.grid(visible=False)


def _auroc(summary: Summary) -> Figure:
    """One row per signal; the mean over tokens is filled, the maximum hollow."""
    from matplotlib.lines import Line2D

    figure, panels = _panels(summary, (10.0, 4.8))
    names = list(dict.fromkeys(row["signal"] for row in summary.tables["answers"] + summary.tables["steps"]))
    for table, axes in panels:
        for row in summary.tables[table]:
            _draw_estimate(axes, row, names.index(row["signal"]))
        axes.axvline(0.5, color=INK, linewidth=0.8)
        axes.set_xlabel("AUROC (0.5: no information)")
    for axes in figure.axes:
        axes.set_yticks(range(len(names)), [_readable(name) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
    handles = [Line2D([], [], color=colour, marker=marker, linestyle="", label=_MEANING[kind])
               for kind, (colour, marker, _) in _LOOKS.items()]
    handles += [Line2D([], [], color=INK, marker="o", linestyle="", markerfacecolor=face, label=text)
                for text, face in (("mean over tokens", INK), ("maximum over tokens", "white"))]
    figure.legend(handles=handles, loc="outside upper left", ncols=5)
    return figure


def _draw_estimate(axes: Axes, row: dict, place: int) -> None:
    """Draws a value with its interval. The mean and the maximum of a signal are drawn one above the other."""
    colour, marker, _ = _LOOKS[row["kind"]]
    height = place + {"mean": -0.17, "max": 0.17}.get(row["statistic"], 0.0)
    if row["auroc_low"] is not None:
        axes.plot([row["auroc_low"], row["auroc_high"]], [height, height], color=colour, linewidth=1.2)
    axes.plot(row["auroc"], height, color=colour, marker=marker, markersize=5,
              markerfacecolor="white" if row["statistic"] == "max" else colour)


def _roc(summary: Summary) -> Figure:
    """ROC curves of the best signal of each kind."""
    figure, panels = _panels(summary, (9.4, 5.0))
    for name, axes in panels:
        of_table = {_label(row): row for row in summary.tables[name]}
        rows = [row for row in summary.data["roc"] if row["cases"] == name]
        for signal in dict.fromkeys(row["signal"] for row in rows):
            own, auroc = [row for row in rows if row["signal"] == signal], of_table[signal]
            colour, _, line = _LOOKS[own[0]["kind"]]
            text = f"{_readable(signal)}: {auroc['auroc']:.2f}{_interval(auroc, 'auroc')}"
            axes.plot([row["share_of_right"] for row in own], [row["share_of_wrong"] for row in own], color=colour,
                      linestyle=line, label=text)
        _diagonal(axes)
        axes.legend(loc="lower right", title="best of its kind: AUROC", title_fontsize=8.5, alignment="left")
        axes.set(xlabel=f"share of right {name} flagged", ylabel=f"share of wrong {name} flagged")
    return figure


def _reliability(summary: Summary) -> Figure:
    """Cross-validated probabilities against outcomes, for the best signal of the draft and the best baseline."""
    figure, panels = _panels(summary, (9.4, 5.0))
    for name, axes in panels:
        rows = [row for row in summary.tables["reliability"] if row["cases"] == name]
        if not rows:
            _say(axes, "only one problem: no cross-validation")
            continue
        for signal in dict.fromkeys(row["signal"] for row in rows):
            own = [row for row in rows if row["signal"] == signal]
            (colour, marker, _), sizes = _LOOKS[own[0]["kind"]], [row["n"] for row in own]
            for row in own:
                if row["observed_low"] is not None:
                    axes.plot([row["predicted"]] * 2, [row["observed_low"], row["observed_high"]], color=colour, linewidth=0.9)
            axes.plot([row["predicted"] for row in own], [row["observed"] for row in own], color=colour, marker=marker,
                      markersize=5, linestyle="", label=f"{_readable(signal)}: bins of {_between(sizes)}")
        _diagonal(axes)
        axes.legend(loc="upper left")
        axes.set(xlabel="predicted probability of being wrong", ylabel=f"share of {name} that is wrong")
    return figure


def _diagonal(axes: Axes) -> None:
    axes.plot([0.0, 1.0], [0.0, 1.0], color=INK, linewidth=0.8)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    axes.set_box_aspect(1)


def _label(row: dict) -> str:
    return row["signal"] if row["statistic"] is None else f"{row['signal']} {row['statistic']}"


def _readable(label: str) -> str:
    """A signal's name for readers, with its statistic if it has one."""
    name, _, statistic = label.partition(" ")
    return " ".join([_NAMES.get(name, name.replace("_", " ")), statistic]).strip()


def _between(sizes: list[int]) -> str:
    return str(min(sizes)) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"


def _interval(row: dict, name: str) -> str:
    return "" if row[f"{name}_low"] is None else f" [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"
