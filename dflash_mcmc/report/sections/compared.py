"""Comparisons of methods: with published results, and of sampler and blend in a two-by-two design."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_mcmc.report import figure
from dflash_mcmc.report.figure import RIGHT, WRONG, error_bars
from dflash_mcmc.report.parts import (
    Drawing,
    ReportColumn,
    ReportTable,
    Section,
    counted,
    differing,
    ends,
    listed,
    named,
    paragraphs,
    percent,
    points,
    shared,
)
from dflash_mcmc.report.published import DATASET, published
from dflash_mcmc.report.reading import Run, blended_layers
from dflash_mcmc.report.study import Study, same_but
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate
from dflash_mcmc.statistics.outcomes import aligned, restricted
from dflash_mcmc.statistics.paired import Interaction, compare, two_by_two

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHODS = {"base": "base (temperature 1)", "greedy": "greedy", "temp": "low temperature", "ps": "power sampling",
           "grpo": "GRPO (trained)", "blend_greedy": "blend, greedy", "blend_ps": "blend, power sampling",
           "draft_blend_ps": "draft blend, power sampling", "tempering": "parallel power tempering", "vote": "majority vote"}
_OF_ONE_SOURCE = ("tempering", "vote")
"""Methods that no other column has; the figure leaves them out."""
_ROLES = {"base": ("temperature", "none"), "greedy": ("greedy", "none"), "temp": ("temperature", "none"),
          "ps": ("power_mh", "none"), "blend_greedy": ("greedy", "layer"), "blend_ps": ("power_mh", "layer"),
          "draft_blend_ps": ("power_mh", "draft")}
_IMPROVEMENTS = (("ps", "base"), ("temp", "base"), ("ps", "greedy"), ("temp", "greedy"), ("ps", "temp"),
                 ("blend_greedy", "greedy"), ("blend_ps", "greedy"), ("blend_ps", "ps"), ("draft_blend_ps", "ps"))
_HERE = "these runs"
_TEXT = """
Intervals of differences are Student's over problems, adjusted for few problems. The percentage in parentheses after a
difference in points is the change relative to the accuracy that it starts from.
"""
_QUOTED = """
Published values are quoted without change: {sources}. The first row of the paper's table is "Base", a draw at temperature 1
(`generate` with `do_sample=True`); the document calls it greedy. The sources give no intervals for differences.
"""


def section(study: Study) -> Section | None:
    """Accuracies, improvements and blends; None if fewer than two runs have a published counterpart."""
    roles = _roles(study)
    if len(roles) < 2:
        return None
    columns = _of_models(study, roles)
    sources = "; ".join(dict.fromkeys(f"{paper.text} ({paper.setting})" for paper in published()))
    beside = study.runs[0].component("dataset") == DATASET
    text = paragraphs(_TEXT) + (paragraphs(_QUOTED.format(sources=sources)) if beside else [])
    several = [f"{run.label} for {METHODS[role]}" for role, run in roles.items() if len(_candidates(study)[role]) > 1]
    if several:
        text.append(f"If several runs have the same method, this section uses one of them: {listed(several)}.")
    tables = [*([_accuracies(columns)] if beside else []), _improvements(study, columns, roles)]
    drawings = [Drawing(f"fig_{study.dataset}_paper_comparison", "Accuracies of these runs next to published ones.",
                        lambda: _figure(columns))] if beside else []
    blends = [roles[name] for name in ("ps", "draft_blend_ps", "blend_ps") if name in roles]
    if "draft_blend_ps" in roles and len(blends) > 1:
        tables.append(_blend_sources(study, blends))
        drawings.append(Drawing(f"fig_{study.dataset}_draft_comparison",
                                "Accuracy and MH acceptance of power sampling by blend.",
                                lambda: _draft_figure(study, blends)))
    return Section("published", "Comparison with published results" if beside else "Improvements", text, tables, drawings)


def _candidates(study: Study) -> dict[str, list[Run]]:
    """The runs that could represent each method. The base has temperature 1, and a low-temperature run one below."""
    candidates = {role: study.role(*made_of) for role, made_of in _ROLES.items()}
    drawn = [(run, float(run.identity.get("sampler.temperature") or 1.0)) for run in candidates["temp"]]
    candidates["base"] = [run for run, temperature in drawn if temperature == 1.0]
    candidates["temp"] = [run for run, temperature in drawn if temperature < 1.0]
    return {role: runs for role, runs in candidates.items() if runs}


def _roles(study: Study) -> dict[str, Run]:
    """The run that represents each method. The chosen runs differ only in sampler, blend and draft.

    If several settings are possible, the one that covers the most methods is used. In a tie, the first one is used.
    """
    candidates = _candidates(study)
    power = {role: runs for role, runs in candidates.items() if role.endswith("ps")}
    settings: list[dict[str, Run]] = []
    for first in (run for runs in power.values() for run in runs):
        alike = {role: [run for run in runs if same_but(run, first, "blend", "draft")] for role, runs in power.items()}
        settings.append({role: matching[0] for role, matching in alike.items() if matching})
    best: dict[str, Run] = max(settings, key=len, default={})
    others = {role: [run for run in runs if all(same_but(run, each, "sampler", "blend", "draft") for each in best.values())]
              for role, runs in candidates.items() if role not in power}
    return {**{role: runs[0] for role, runs in others.items() if runs}, **best}


def _of_models(study: Study, roles: dict[str, Run]) -> dict[tuple[str, str], dict[str, IntervalEstimate]]:
    """Accuracies by method, for each published model and source, and for these runs."""
    here = study.runs[0].component("dataset") == DATASET  # accuracies on other problems cannot be compared
    accuracies = {(paper.model, paper.source): paper.accuracy for paper in published()} if here else {}
    accuracies[_HERE, study.dataset] = {role: study.entry(run).accuracy for role, run in roles.items()}
    return accuracies


def _accuracies(columns: dict[tuple[str, str], dict[str, IntervalEstimate]]) -> ReportTable:
    """One row per model, one column per method."""
    rows = [{"model": model, "source": source, "method": METHODS[method], **estimate.columns("accuracy"),
             "n": estimate.n or None} for (model, source), of in columns.items() for method, estimate in of.items()]
    wide = [{"model": model, "source": source, **of} for (model, source), of in columns.items()]

    def column(method: str) -> ReportColumn:
        return ReportColumn(METHODS[method], lambda row: percent(*row[method][:3]) if method in row else "-")

    methods = [method for method in METHODS if any(method in of for of in columns.values())]
    return ReportTable("published", "Accuracies", [named("model", "model"), named("source", "source"), *map(column, methods)],
                       wide, data=rows)


def _improvements(study: Study, columns: dict[tuple[str, str], dict[str, IntervalEstimate]],
                  roles: dict[str, Run]) -> ReportTable:
    """One row per improvement, one column per model; a model of several sources has a column for each."""
    models = [model for model, _ in columns]
    labels = {source: source[0] if models.count(source[0]) == 1 else ", ".join(source) for source in columns}
    rows = []
    for method, base in _IMPROVEMENTS:
        row: dict[str, object] = {"improvement": f"{METHODS[method]} over {METHODS[base]}"}
        for source, of in columns.items():
            if method in of and base in of:
                row |= (_measured(study, roles[method], roles[base]) if source[0] == _HERE else
                        _difference(labels[source], of[method].known, of[base].known))
        if len(row) > 1:
            rows.append(row)

    def column(model: str) -> ReportColumn:
        def text(row: dict) -> str:
            if f"{model}_points" not in row:
                return "-"
            relative = row[f"{model}_relative"]
            return points(*ends(row, f"{model}_points")) + ("" if relative is None else f" ({100.0 * relative:+.1f} %)")
        return ReportColumn(model, text)

    keys = list(dict.fromkeys(key for row in rows for key in row))
    return ReportTable("improvements", "Improvements (percentage points)", [named("improvement", "improvement"),
                                                            *map(column, labels.values())], rows,
                       data=[{key: row.get(key) for key in keys} for row in rows])


def _difference(name: str, own: float, base: float) -> dict:
    return {f"{name}_points": own - base, f"{name}_relative": own / base - 1.0 if base else None}


def _measured(study: Study, run: Run, base: Run) -> dict:
    own, other, _ = aligned(study.entry(run).outcomes, study.entry(base).outcomes)
    if not own.problems:
        return {}
    return {**_difference(_HERE, float(own.correct.mean()), float(other.correct.mean())),
            **compare(own, other).difference.columns(f"{_HERE}_points")}


def _blend_sources(study: Study, blends: list[Run]) -> ReportTable:
    """Table 6.3 of the guided-power-sampling document."""
    rows = []
    for run in blends:
        share, source = study.entry(run).accuracy, {"layer": blended_layers(run), "draft": "draft"}
        rows.append({"run": run.shown, "correct": round(share.known * share.n), "total": share.n, **share.columns("accuracy"),
                     **_acceptance(run).columns("acceptance"), "blend_source": source.get(run.component("blend"), "-")})
    columns = [named("condition", "run"), counted("correct", "correct"), counted("total", "total"),
               shared("accuracy", "accuracy"), ReportColumn("MH accept", lambda row: percent(row["acceptance"])),
               named("blend source", "blend_source")]
    return ReportTable("blend_sources", "Power sampling by blend", columns, rows)


def _acceptance(run: Run) -> IntervalEstimate:
    of = Clusters([record["problem"] for record in run.records])
    return of.ratio([record["accepted"] for record in run.records], [record["proposals"] for record in run.records])


def _figure(columns: dict[tuple[str, str], dict[str, IntervalEstimate]]) -> Figure:
    from matplotlib.figure import Figure

    methods = [method for method in METHODS if method not in _OF_ONE_SOURCE and any(method in of for of in columns.values())]
    drawn = Figure(figsize=(11.4, 4.2), layout="constrained")
    axes = drawn.subplots()
    for index, method in enumerate(methods):
        turn, place = divmod(index, len(figure.PALETTE))
        style: dict[str, Any] = {"color": figure.PALETTE[place], "marker": figure.MARKERS[(place + turn) % 7],
                                 "markersize": 6, "linestyle": "none"}
        axes.plot([], [], label=METHODS[method], **style)
        for group, of in enumerate(columns.values()):
            if method in of:
                _point(axes, group + (index - (len(methods) - 1) / 2) * 0.135, of[method], style)
    axes.set_xticks(range(len(columns)), [f"{model}\n{source}" for model, source in columns])
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("correct answers, %\n95 % intervals if n is known")
    axes.set_title("Comparison with published results")
    drawn.legend(loc="outside lower center", ncols=4)
    return drawn


def _point(axes: Axes, x: float, estimate: IntervalEstimate, style: dict[str, Any]) -> None:
    """Draws a point and its interval, with the value above them."""
    height, ends = 100.0 * estimate.known, [100.0 * end for end in estimate.interval or ()]
    if ends:
        axes.plot([x] * 2, ends, color=style["color"], linewidth=1.4, alpha=0.6)
    axes.plot(x, height, **style)
    axes.annotate(f"{height:.1f}", (x, ends[1] if ends else height), (0, 2 if ends else 6), fontsize=6.5,
                  textcoords="offset points", ha="center")


def _draft_figure(study: Study, blends: list[Run]) -> Figure:
    from matplotlib.figure import Figure

    labels = [run.shown for run in blends]
    shares, rates = [study.entry(run).accuracy for run in blends], [_acceptance(run) for run in blends]
    drawn = Figure(figsize=figure.rows_size(labels, 2), layout="constrained")
    left, right = drawn.subplots(1, 2, sharey=True)
    figure.draw_estimates(left, labels, shares, [f"{percent(share.value)}, n = {share.n:,}" for share in shares])
    figure.draw_estimates(right, labels, rates, [percent(rate.value) for rate in rates])
    left.set_title("Accuracy by blend")
    left.set_xlabel("correct answers, %, with 95 % intervals")
    right.set_title("MH acceptance")
    right.set_xlabel("proposals accepted, %, with 95 % intervals")
    return drawn


_CELLS = ("00", "01", "10", "11")
_MOST_DRAWN = 6
_INTERACTION_TEXT = """
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


def interaction_section(study: Study) -> Section | None:
    """One row per sampler and blend for which all four cells exist among the runs and differ in nothing else."""
    squares = [square for runs in _squares(study) if (square := _interaction_measured(study, runs)) is not None]
    if not squares:
        return None
    drawing = Drawing(f"fig_{study.dataset}_interaction", "Accuracy of greedy decoding and of the sampler, without and with "
                      "the blend. The number above each panel is the interaction in points.",
                      lambda: _interaction_figure(squares[:_MOST_DRAWN]))
    return Section("interaction", "Interaction of blend and sampler", paragraphs(_INTERACTION_TEXT),
                   [ReportTable("interaction", "Blend and sampler", _columns(), [_row(square) for square in squares])],
                   [drawing])


def _squares(study: Study) -> list[dict[str, Run]]:
    """For every run with a sampler and a blend: that run, and the three runs that lack the sampler, the blend or both."""
    squares = []
    for both in study.runs:
        sampler, blend = both.component("sampler"), both.component("blend")
        if sampler == "greedy" or blend == "none":
            continue
        cells = {"00": _counterpart(study, both, "greedy", "none", "sampler", "blend", "draft"),
                 "01": _counterpart(study, both, sampler, "none", "blend", "draft"),
                 "10": _counterpart(study, both, "greedy", blend, "sampler"), "11": both}
        present = {name: run for name, run in cells.items() if run is not None}
        if len(present) == len(cells):
            squares.append(present)
    return squares


def _counterpart(study: Study, run: Run, sampler: str, blend: str, *groups: str) -> Run | None:
    return next((other for other in study.role(sampler, blend) if same_but(other, run, *groups)), None)


def _interaction_measured(study: Study, runs: dict[str, Run]) -> _Square | None:
    """The interaction of four runs on their common problems; None if they have no problem in common."""
    of = {name: study.entry(run).outcomes for name, run in runs.items()}
    sets = [set(outcomes.problems) for outcomes in of.values()]
    in_all, in_any = set.intersection(*sets), set.union(*sets)
    shared = [problem for problem in of["00"].problems if problem in in_all]
    if not shared:
        return None
    interaction = two_by_two(*(restricted(of[name], shared) for name in _CELLS))
    return _Square(runs, interaction, len(shared), len(in_any) - len(shared))


def _row(square: _Square) -> dict:
    cells = square.found.cells
    accuracy = {name: cell.known for name, cell in cells.items()}
    return {"sampler": square.runs["01"].label, "blend": square.runs["10"].label, "both_on": square.runs["11"].label,
            "problems": square.problems, "left_out": square.left_out,
            **{key: end for name in _CELLS for key, end in cells[name].columns(f"accuracy_{name}").items()},
            "blend_on_greedy": accuracy["10"] - accuracy["00"], "blend_on_sampler": accuracy["11"] - accuracy["01"],
            "sampler_without_blend": accuracy["01"] - accuracy["00"], "sampler_under_blend": accuracy["11"] - accuracy["10"],
            "sum_of_both": accuracy["10"] + accuracy["01"] - 2.0 * accuracy["00"], "together": accuracy["11"] - accuracy["00"],
            **square.found.effect.columns("interaction")}


def _columns() -> list[ReportColumn]:
    def blended(header: str, name: str, effect: str) -> ReportColumn:
        return ReportColumn(header, lambda row: f"{percent(row[f'accuracy_{name}'])} ({points(row[effect])})")

    return [named("blend and sampler", "both_on"), counted("problems", "problems"),
            ReportColumn("greedy", lambda row: percent(row["accuracy_00"])), blended("greedy, blend", "10", "blend_on_greedy"),
            ReportColumn("sampler", lambda row: percent(row["accuracy_01"])),
            blended("sampler, blend", "11", "blend_on_sampler"),
            differing("interaction (points)", "interaction"), differing("sum of the two effects (points)", "sum_of_both"),
            differing("effect of both (points)", "together"), counted("problems left out", "left_out")]


def _interaction_figure(squares: list[_Square]) -> Figure:
    from matplotlib.figure import Figure

    columns = min(3, len(squares))
    lines = -(-len(squares) // columns)
    drawn = Figure(figsize=(max(4.6, 3.4 * columns), 3.4 * lines), layout="constrained")
    panels = list(drawn.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for axes, square in zip(panels[: len(squares)], squares, strict=True):
        for names, text, style, shift in ((("00", "01"), "no blend", {"color": RIGHT, "marker": "o", "linestyle": "-"}, -0.03),
                                          (("10", "11"), "blend", {"color": WRONG, "marker": "s", "linestyle": "--"}, 0.03)):
            estimates = [square.found.cells[name] for name in names]
            axes.errorbar([shift, 1.0 + shift], [100.0 * cell.known for cell in estimates], error_bars(estimates), capsize=3,
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
