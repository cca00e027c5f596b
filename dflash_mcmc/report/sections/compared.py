"""Comparisons of methods: with published results, and of sampler and blend in a two-by-two design."""

from functools import partial
from typing import Any

from dflash_mcmc.report import figure, parts, reading
from dflash_mcmc.report.study import Study, same_but
from dflash_mcmc.statistics.estimates import Clusters, IntervalEstimate, aligned, restricted
from dflash_mcmc.statistics.paired import compare, two_by_two

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


def section(study: Study) -> parts.Section | None:
    """Accuracies, improvements and blends; None if fewer than two runs have a published counterpart."""
    # A run for each method: the runs differ in sampler, blend and draft alone, by the setting that covers the most methods.
    candidates = {role: study.role(*made_of) for role, made_of in _ROLES.items()}
    drawn = [(run, float(run.identity.get("sampler.temperature") or 1.0)) for run in candidates["temp"]]
    candidates["base"] = [run for run, temperature in drawn if temperature == 1.0]
    candidates["temp"] = [run for run, temperature in drawn if temperature < 1.0]
    power = {role: runs for role, runs in candidates.items() if role.endswith("ps")}
    settings = [{role: alike[0] for role, runs in power.items()
                 if (alike := [run for run in runs if same_but(run, first, "blend", "draft")])}
                for firsts in power.values() for first in firsts]
    best: dict[str, reading.Run] = max(settings, key=len, default={})
    others = {role: alike[0] for role, runs in candidates.items() if role not in power and (
        alike := [run for run in runs if all(same_but(run, each, "sampler", "blend", "draft") for each in best.values())])}
    roles = {**others, **best}
    several = [f"{run.label} for {METHODS[role]}" for role, run in roles.items() if len(candidates[role]) > 1]
    if len(roles) < 2:
        return None
    beside = study.runs[0].component("dataset") == reading.DATASET  # accuracies on other problems cannot be compared
    accuracies = reading.published() if beside else {}
    accuracies[_HERE, study.dataset] = {role: study.entry(run).accuracy for role, run in roles.items()}
    text, tables, drawings = parts.paragraphs(_TEXT), list[parts.ReportTable](), list[parts.Drawing]()
    if beside:
        text += parts.paragraphs(_QUOTED.format(sources="; ".join(reading.sources())))
        flat = [{"model": model, "source": source, "method": METHODS[method], **estimate.columns("accuracy"),
                 "n": estimate.n or None} for (model, source), of in accuracies.items() for method, estimate in of.items()]
        wide = [{"model": model, "source": source, **{method: parts.percent(*estimate[:3]) for method, estimate in of.items()}}
                for (model, source), of in accuracies.items()]
        methods = {METHODS[method]: (method, "") for method in METHODS if any(method in of for of in accuracies.values())}
        tables.append(parts.ReportTable("published", "Accuracies", {"model": "model", "source": "source", **methods}, wide,
                                        data=flat))
        drawings.append(parts.Drawing(f"fig_{study.dataset}_paper_comparison",
                                      "Accuracies of these runs next to published ones.", partial(_figure, accuracies)))
    if several:
        text.append(f"If several runs have the same method, this section uses one of them: {parts.listed(several)}.")
    tables.append(_improvements(study, accuracies, roles))
    blends = [roles[name] for name in ("ps", "draft_blend_ps", "blend_ps") if name in roles]
    if "draft_blend_ps" in roles and len(blends) > 1:
        labels, shares, rates = [run.shown for run in blends], [study.entry(run).accuracy for run in blends], []
        for run in blends:
            proposals = [record["proposals"] for record in run.records]
            rates.append(Clusters([record["problem"] for record in run.records]).ratio(
                [record["accepted"] for record in run.records], proposals))
        rows = [{"run": run.shown, "correct": round(share.known * share.n), "total": share.n, **share.columns("accuracy"),
                 **rate.columns("acceptance"), "blend_source": {
                     "layer": f"layer {run.identity.get('blend.layer')}", "draft": "draft"}.get(
                     run.component("blend"), "-")} for run, share, rate in zip(blends, shares, rates, strict=True)]
        tables.append(parts.ReportTable("blend_sources", "Power sampling by blend", {  # table 6.3 of guided power sampling
            "condition": "run", "correct": ("correct", "count"), "total": ("total", "count"),
            "accuracy": ("accuracy", "share"), "MH accept": lambda row: parts.percent(row["acceptance"]),
            "blend source": "blend_source"}, rows))
        drawings.append(parts.Drawing(
            f"fig_{study.dataset}_draft_comparison", "Accuracy and MH acceptance of power sampling by blend.", partial(
                figure.estimates, labels, ("Accuracy by blend", "correct answers, %, with 95 % intervals", shares,
                                           [f"{parts.percent(share.value)}, n = {share.n:,}" for share in shares]),
                ("MH acceptance", "proposals accepted, %, with 95 % intervals", rates,
                 [parts.percent(of.value) for of in rates]))))
    title = "Comparison with published results" if beside else "Improvements"
    return parts.Section("published", title, text, tables, drawings)


def _improvements(study: Study, accuracies: dict[tuple[str, str], dict[str, IntervalEstimate]],
                  roles: dict[str, reading.Run]) -> parts.ReportTable:
    """One row per improvement, one column per model; a model of several sources has a column for each."""
    models = [model for model, _ in accuracies]
    labels = {source: source[0] if models.count(source[0]) == 1 else ", ".join(source) for source in accuracies}
    rows, wide = list[dict[str, Any]](), list[dict[str, Any]]()
    for method, base in _IMPROVEMENTS:
        row, cells = dict[str, Any](), dict[str, str]()
        for source, of in accuracies.items():
            if method not in of or base not in of:
                continue
            label, measured, value, start = labels[source], {}, of[method].known, of[base].known
            if source[0] == _HERE:
                own, other, _ = aligned(study.entry(roles[method]).outcomes, study.entry(roles[base]).outcomes)
                if not own.problems:
                    continue
                value, start = float(own.correct.mean()), float(other.correct.mean())
                measured = compare(own, other).difference.columns(f"{label}_points")
            relative = value / start - 1.0 if start else None
            row |= {f"{label}_points": value - start, f"{label}_relative": relative, **measured}
            cells[label] = parts.number(row, f"{label}_points", "points") + (
                "" if relative is None else f" ({100.0 * relative:+.1f} %)")
        if row:
            name = {"improvement": f"{METHODS[method]} over {METHODS[base]}"}
            rows.append(name | row)
            wide.append(name | cells)
    columns = {"improvement": "improvement", **{label: (label, "") for label in labels.values()}}
    return parts.ReportTable("improvements", "Improvements (percentage points)", columns, wide, data=rows)


def _figure(accuracies: dict[tuple[str, str], dict[str, IntervalEstimate]]) -> "figure.Figure":
    methods = [method for method in METHODS if method not in _OF_ONE_SOURCE
               and any(method in of for of in accuracies.values())]
    drawn, (axes,) = figure.panels((11.4, 4.2))
    for index, method in enumerate(methods):
        turn, place = divmod(index, len(figure.PALETTE))
        style: dict[str, Any] = {"color": figure.PALETTE[place], "marker": figure.MARKERS[(place + turn) % 7],
                                 "markersize": 6, "linestyle": "none"}
        axes.plot([], [], label=METHODS[method], **style)
        for group, of in enumerate(accuracies.values()):
            if method in of:
                x, height = group + (index - (len(methods) - 1) / 2) * 0.135, 100.0 * of[method].known
                ends = [100.0 * end for end in of[method].interval or ()]
                if ends:
                    axes.plot([x] * 2, ends, color=style["color"], linewidth=1.4, alpha=0.6)
                axes.plot(x, height, **style)
                axes.annotate(f"{height:.1f}", (x, ends[1] if ends else height), (0, 2 if ends else 6), fontsize=6.5,
                              textcoords="offset points", ha="center")
    axes.set_xticks(range(len(accuracies)), [f"{model}\n{source}" for model, source in accuracies])
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("correct answers, %\n95 % intervals if n is known")
    axes.set_title("Comparison with published results")
    figure.legend_below(drawn, 4)
    return drawn


_CELLS = ("00", "01", "10", "11")
"""The first digit is 1 if the blend is on, the second is 1 if the sampler is on."""
_INTERACTION_TEXT = """
The four cells of each row differ only in the blend and the sampler. A number in parentheses is the effect of the blend in
points. The interaction is the gain from the sampler with the blend minus the gain from the sampler without it. It is 0 if the
two effects add up. If its interval includes 0, the runs do not show an interaction. The interval is Student's over problems,
each with all four runs, adjusted for few problems.
"""


def interaction_section(study: Study) -> parts.Section | None:
    """One row per sampler and blend for which all four cells exist among the runs and differ in nothing else."""
    def counterpart(run: reading.Run, sampler: str, blend: str, *groups: str) -> reading.Run | None:
        return next((other for other in study.role(sampler, blend) if same_but(other, run, *groups)), None)

    rows = list[dict[str, Any]]()
    for both in study.runs:
        sampler, blend = both.component("sampler"), both.component("blend")
        if sampler == "greedy" or blend == "none":
            continue
        runs = [run for run in (counterpart(both, "greedy", "none", "sampler", "blend", "draft"),
                                counterpart(both, sampler, "none", "blend", "draft"),
                                counterpart(both, "greedy", blend, "sampler"), both) if run is not None]
        if len(runs) < len(_CELLS):
            continue
        outcomes = [study.entry(run).outcomes for run in runs]
        in_all, in_any = (of(*(set(each.problems) for each in outcomes)) for of in (set.intersection, set.union))
        if not in_all:
            continue
        shared = [problem for problem in outcomes[0].problems if problem in in_all]
        found = two_by_two(*(restricted(of, shared) for of in outcomes))
        neither, drawn, blended, together = (found.cells[name].known for name in _CELLS)
        rows.append({
            "sampler": runs[1].label, "blend": runs[2].label, "both_on": both.label, "problems": len(shared),
            "left_out": len(in_any) - len(shared),
            **{key: end for name in _CELLS for key, end in found.cells[name].columns(f"accuracy_{name}").items()},
            "blend_on_greedy": blended - neither, "blend_on_sampler": together - drawn,
            "sampler_without_blend": drawn - neither, "sampler_under_blend": together - blended,
            "sum_of_both": blended + drawn - 2.0 * neither, "together": together - neither,
            **found.effect.columns("interaction")})
    columns = {"blend and sampler": "both_on", "problems": ("problems", "count"),
               "greedy": lambda row: parts.percent(row["accuracy_00"]),
               "greedy, blend": lambda row: f"{parts.percent(row['accuracy_10'])} ({parts.points(row['blend_on_greedy'])})",
               "sampler": lambda row: parts.percent(row["accuracy_01"]),
               "sampler, blend": lambda row: f"{parts.percent(row['accuracy_11'])} ({parts.points(row['blend_on_sampler'])})",
               "interaction (points)": ("interaction", "points"), "sum of the two effects (points)": ("sum_of_both", "points"),
               "effect of both (points)": ("together", "points"), "problems left out": ("left_out", "count")}
    return parts.Section("interaction", "Interaction of blend and sampler", parts.paragraphs(_INTERACTION_TEXT), [
        parts.ReportTable("interaction", "Blend and sampler", columns, rows)]) if rows else None
