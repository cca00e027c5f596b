"""Whether a blend helps more with one sampler than with another (section 4.4 of the guided-power-sampling document)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.report.parts import Column, Drawing, Section, Table, counted, differing, named, paragraphs, percent, points
from dflash_mcmc.report.runs import Run
from dflash_mcmc.report.study import Study, same_but
from dflash_mcmc.statistics.interaction import Interaction, two_by_two
from dflash_mcmc.statistics.outcomes import restricted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CELLS = ("00", "01", "10", "11")
_MOST_DRAWN = 6
_TEXT = """
The four cells of each row differ only in the blend and the sampler. A number in parentheses is the effect of the blend in
points. The interaction is the gain from the sampler with the blend minus the gain from the sampler without it. It is 0 if
the two effects add up. If its interval includes 0, the runs do not show an interaction. The interval is Student's over
problems, each with all four runs, adjusted for few problems.
"""


class _Square(NamedTuple):
    runs: dict[str, Run]
    """The four runs. The first digit of a key is 1 if the blend is on, the second digit is 1 if the sampler is on."""
    found: Interaction
    problems: int
    left_out: int


def section(study: Study) -> Section | None:
    """One row per sampler and blend for which all four cells exist among the runs and differ in nothing else."""
    squares = [square for runs in _squares(study) if (square := _measured(study, runs)) is not None]
    if not squares:
        return None
    drawing = Drawing(f"fig_{study.dataset}_interaction", "Accuracy of greedy decoding and of the sampler, without and with "
                      "the blend. The number above each panel is the interaction in points.",
                      lambda: _figure(squares[:_MOST_DRAWN]))
    return Section("interaction", "Interaction of blend and sampler", paragraphs(_TEXT),
                   [Table("interaction", "Blend and sampler", _columns(), [_row(square) for square in squares])], [drawing])


def _squares(study: Study) -> list[dict[str, Run]]:
    """For every run with a sampler and a blend: that run, and the three runs that lack the sampler, the blend or both."""
    found = []
    for both in study.runs:
        sampler, blend = both.component("sampler"), both.component("blend")
        if sampler == "greedy" or blend == "none":
            continue
        cells = {"00": _counterpart(study, both, "greedy", "none", "sampler", "blend", "draft"),
                 "01": _counterpart(study, both, sampler, "none", "blend", "draft"),
                 "10": _counterpart(study, both, "greedy", blend, "sampler"), "11": both}
        present = {name: run for name, run in cells.items() if run is not None}
        if len(present) == len(cells):
            found.append(present)
    return found


def _counterpart(study: Study, run: Run, sampler: str, blend: str, *groups: str) -> Run | None:
    return next((other for other in study.role(sampler, blend) if same_but(other, run, *groups)), None)


def _measured(study: Study, runs: dict[str, Run]) -> _Square | None:
    """The interaction of four runs on their common problems; None if they have no problem in common."""
    of = {name: study.entry(run).outcomes for name, run in runs.items()}
    sets = [set(outcomes.problems) for outcomes in of.values()]
    in_all, in_any = set.intersection(*sets), set.union(*sets)
    shared = [problem for problem in of["00"].problems if problem in in_all]
    if not shared:
        return None
    found = two_by_two(*(restricted(of[name], shared) for name in _CELLS))
    return _Square(runs, found, len(shared), len(in_any) - len(shared))


def _row(square: _Square) -> dict:
    cells = square.found.cells
    value = {name: cell.known for name, cell in cells.items()}
    return {"sampler": square.runs["01"].label, "blend": square.runs["10"].label, "both_on": square.runs["11"].label,
            "problems": square.problems, "left_out": square.left_out,
            **{key: end for name in _CELLS for key, end in cells[name].columns(f"accuracy_{name}").items()},
            "blend_on_greedy": value["10"] - value["00"], "blend_on_sampler": value["11"] - value["01"],
            "sampler_without_blend": value["01"] - value["00"], "sampler_under_blend": value["11"] - value["10"],
            "sum_of_both": value["10"] + value["01"] - 2.0 * value["00"], "together": value["11"] - value["00"],
            **square.found.effect.columns("interaction")}


def _columns() -> list[Column]:
    def blended(header: str, name: str, effect: str) -> Column:
        return Column(header, lambda row: f"{percent(row[f'accuracy_{name}'])} ({points(row[effect])})")

    return [named("blend and sampler", "both_on"), counted("problems", "problems"),
            Column("greedy", lambda row: percent(row["accuracy_00"])), blended("greedy, blend", "10", "blend_on_greedy"),
            Column("sampler", lambda row: percent(row["accuracy_01"])), blended("sampler, blend", "11", "blend_on_sampler"),
            differing("interaction (points)", "interaction"), differing("sum of the two effects (points)", "sum_of_both"),
            differing("effect of both (points)", "together"), counted("problems left out", "left_out")]


def _figure(squares: list[_Square]) -> Figure:
    from matplotlib.figure import Figure

    from dflash_mcmc.report.figure import RIGHT, WRONG, error_bars

    columns = min(3, len(squares))
    lines = -(-len(squares) // columns)
    drawn = Figure(figsize=(max(4.6, 3.4 * columns), 3.4 * lines), layout="constrained")
    panels = list(drawn.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for axes, square in zip(panels[: len(squares)], squares, strict=True):
        for names, text, style, shift in ((("00", "01"), "no blend", {"color": RIGHT, "marker": "o", "linestyle": "-"}, -0.03),
                                          (("10", "11"), "blend", {"color": WRONG, "marker": "s", "linestyle": "--"}, 0.03)):
            values = [square.found.cells[name] for name in names]
            axes.errorbar([shift, 1.0 + shift], [100.0 * cell.known for cell in values], error_bars(values), capsize=3,
                          label=text, **style)
        axes.set_xticks([0, 1], [square.runs["00"].condition, square.runs["01"].condition])
        axes.set_xlim(-0.35, 1.35)
        axes.set_title(f"{square.runs['11'].label}\n{points(*square.found.effect[:3])}", fontsize=8.5)
        axes.set_xlabel(f"n = {square.problems:,} problems")
    for axes in panels[len(squares) :]:
        axes.set_visible(False)
    panels[0].set_ylabel("correct answers, %")
    panels[0].legend(loc="best")
    return drawn
