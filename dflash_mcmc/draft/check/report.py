"""The text, the JSON and the figure of a check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from dflash_mcmc.draft.check.check import Checked, Row, with_interval
from dflash_mcmc.errors import writing
from dflash_mcmc.report import figure as style
from dflash_mcmc.statistics.intervals import IntervalEstimate
from dflash_mcmc.store.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN = 12
"""Alternatives in the table and in the figure: those with the highest tau. The JSON has all."""
_SLOT_LINES = (("right", "its own token"), ("shift +1", "the next token"), ("shift -1", "the token before"))


def text(checked: Checked) -> str:
    """The tables and the verdict."""
    trials = sorted(checked.trials, key=lambda each: -each.tau.known)
    paragraphs = [
        f"{checked.draft} on {checked.model}, {checked.problems} problems",
        _table(["situation", "tau", "note"], [[row.name, with_interval(row.tau, unknown="-"), row.note]
                                              for row in (*checked.positions, *checked.templates)]),
        _table(["slot", *(name for _, name in _SLOT_LINES), "blocks"],
               [[str(row["slot"]), *(_share(row[key]) for key, _ in _SLOT_LINES), str(row["blocks"])]
                for row in checked.slots]),
        _table(["changed", "tau", "change", "verdict"],
               [[each.name, with_interval(each.tau, unknown="-"), with_interval(each.change, "+.2f", "-"),
                 "helps" if each.helps else ""]
                for each in trials[:_SHOWN]]),
        f"{len(trials)} alternatives tried, the best {min(_SHOWN, len(trials))} shown. "
        f"The engine and the reference forward agree on {checked.agreement:.1%} of the blocks.",
        *(f"not tried: {clause}" for clause in checked.not_applicable),
        *(f"differs from the checkpoint's record: {clause}" for clause in checked.differences),
        f"{checked.verdict.outcome}: {checked.verdict.sentence}"]
    return "\n\n".join(paragraphs[:4]) + "\n\n" + "\n".join(paragraphs[4:])


def write(checked: Checked, folder: Path) -> None:
    """Writes check.json, check.png and check.svg. Raises UserError if they cannot be written."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with style.style():
        style.save(figure(checked), folder, "check")
    with writing(folder / "check.json"):
        write_atomically(folder / "check.json", json.dumps(values(checked), indent=1) + "\n")


def values(checked: Checked) -> dict[str, object]:
    """Everything that was measured, for JSON."""
    return {
        "outcome": checked.verdict.outcome, "sentence": checked.verdict.sentence, "draft": checked.draft,
        "model": checked.model, "problems": checked.problems, "expected": checked.expected,
        "agreement": checked.agreement, "differences": checked.differences, "not_tried": checked.not_applicable,
        "positions": [_row(row) for row in checked.positions], "templates": [_row(row) for row in checked.templates],
        "slots": checked.slots,
        "alternatives": [{"kind": each.kind, "name": each.name, **each.tau.columns("tau"), "base_tau": each.base_tau,
                          **each.change.columns("change"), "helps": each.helps, "not_numbers": each.not_numbers}
                         for each in checked.trials]}


def figure(checked: Checked) -> Figure:
    """Acceptance by slot, tau by position and by template state, and tau in the best alternatives."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(15.0, 8.6), layout="constrained")
    (slots, positions), (templates, trials) = made.subplots(2, 2)
    _slots(slots, checked)
    measured = [row for row in checked.positions if row.tau.value is not None]
    _rows(positions, [row.name for row in measured], [row.tau for row in measured], None)
    positions.set(title="By temperature and position in the answer", xlabel="tokens for each forward (tau)")
    measured = [row for row in checked.templates if row.tau.value is not None]
    _rows(templates, [row.name for row in measured], [row.tau for row in measured], measured[0].tau.value)
    templates.set(title="By template state, temperature 0", xlabel="tokens for each forward (tau)")
    best = sorted(checked.trials, key=lambda each: -each.tau.known)[:_SHOWN]
    _rows(trials, [each.name for each in best], [each.change for each in best], 0.0, [each.helps for each in best])
    trials.set(title="With one thing changed, on the same blocks", xlabel="change of tau")
    made.suptitle(f"{checked.verdict.outcome}: {checked.verdict.sentence}", fontsize=9, wrap=True)
    return made


def _slots(axes: Axes, checked: Checked) -> None:
    numbers = [row["slot"] for row in checked.slots]
    for (key, name), colour, marker in zip(_SLOT_LINES, style.PALETTE, style.MARKERS, strict=False):
        shares = [None if row[key] is None else 100.0 * row[key] for row in checked.slots]
        axes.plot(numbers, shares, marker=marker, color=colour, label=name)  # type: ignore[arg-type]
    axes.set(title="What a slot predicts, whether or not the slots before it are right", xlabel="slot of the block",
             ylabel="share of proposals (%)", ylim=(0.0, 100.0))
    axes.set_xticks(numbers)
    axes.legend()


def _rows(axes: Axes, names: list[str], estimates: list[IntervalEstimate], line: float | None,
          emphasised: list[bool] | None = None) -> None:
    for y, (estimate, strong) in enumerate(zip(estimates, emphasised or [False] * len(names), strict=True)):
        colour = style.WRONG if strong else style.RIGHT
        if estimate.interval is not None:
            axes.plot(list(estimate.interval), [y, y], color=colour, linewidth=2.2, alpha=0.55, solid_capstyle="butt")
        axes.plot([estimate.known], [y], "D" if strong else "o", color=colour, markersize=6.0)
    if line is not None:
        axes.axvline(line, color=style.INK, linewidth=0.9)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _row(row: Row) -> dict[str, object]:
    return {"name": row.name, **row.tau.columns("tau"), "forwards": row.tau.n, "note": row.note}


def _table(headers: list[str], rows: list[list[str]]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
