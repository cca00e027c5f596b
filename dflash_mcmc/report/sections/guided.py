"""Gain of guided targets over the model alone, by sampler and source: over beta, and against the agreement with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.report.parts import (
    Drawing,
    ReportColumn,
    ReportTable,
    Section,
    differing,
    named,
    numbered,
    paragraphs,
    probability,
    shared,
)
from dflash_mcmc.report.reading import Run
from dflash_mcmc.report.study import Study, same_but
from dflash_mcmc.statistics.outcomes import aligned, outcomes
from dflash_mcmc.statistics.paired import LEVEL, Paired, compare, holm

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_SAMPLERS, _MOST_SOURCES = 4, 7
_TEXT = """
guided = (1 - beta) * final + beta * other. The gain is the accuracy at a beta minus that of the model alone (blend=none, or
beta 0), with the same sampler on the same problems. Intervals are those of one comparison. p is of the exact paired test,
adjusted for all betas of a curve (Holm), since the best of several betas looks better than it is. A gain is resolved if this p
is at most 0.05; its point is filled.

Agreement is the share of an answer's characters before it first differs from the answer of the model alone, a mean over the
answers. A source that agrees changes nothing; one that helps while it agrees little is complementary. Samplers that draw at
random differ sooner than greedy decoding does.
"""


class _AtBeta(NamedTuple):
    """The runs at one beta, compared with the model alone."""

    beta: float
    paired: Paired
    p_value: float
    """Adjusted for all betas of the curve."""
    agreement: float | None

    @property
    def gain(self) -> float:
        return self.paired.difference.known

    @property
    def is_resolved(self) -> bool:
        return self.p_value <= LEVEL


class _Curve(NamedTuple):
    """The points of one source with one sampler, in the order of beta."""

    sampler: str
    source: str
    points: list[_AtBeta]

    @property
    def best(self) -> _AtBeta:
        """The point of the largest gain; of several, that with the beta closest to 0."""
        return max(self.points, key=lambda point: (point.gain, -abs(point.beta)))


def section(study: Study) -> Section | None:
    """A table of the best beta of each source and sampler, one of all points, and two figures."""
    curves = _curves(study.runs)
    if max((len(curve.points) for curve in curves), default=0) < 2 and len(curves) < 2:
        return None
    drawings = [Drawing("fig_gain_over_beta", "Gain over the model alone by beta, for each sampler and source.",
                        partial(_panels, curves, "beta")),
                Drawing("fig_gain_over_agreement", "Gain over the model alone against the agreement with it.",
                        partial(_panels, curves, "agreement"))]
    return Section("guided", "Guided targets", paragraphs(_TEXT), [_best_table(curves), _table(curves)], drawings)


def _curves(runs: Sequence[Run]) -> list[_Curve]:
    """The curves of all sources that have a run of the model alone beside them."""
    parts: dict[tuple[str, str], dict[float, list[Run]]] = {}
    for run in runs:
        beta = run.identity.get("blend.beta")
        if isinstance(beta, (int, float)) and beta != 0:
            rest = {key: value for key, value in run.identity.items() if key not in ("seed", "blend.beta")}
            source = {key: rest.pop(key) for key in list(rest) if key.partition(".")[0] == "blend"}
            name = json.dumps(rest, sort_keys=True), json.dumps(source, sort_keys=True)
            parts.setdefault(name, {}).setdefault(float(beta), []).append(run)
    firsts = [next(iter(part.values()))[0] for part in parts.values()]
    names = [_names(firsts, group) for group in ("sampler", "blend")]
    curves = []
    for place, part in enumerate(parts.values()):
        alone = [run for run in runs if run.identity.get("blend.beta", 0) == 0 and run.component("draft") in (
            "none", firsts[place].component("draft")) and same_but(run, firsts[place], "blend", "seed", "draft")]
        points = _points(part, alone)
        if points:
            curves.append(_Curve(names[0][place], names[1][place], points))
    return curves


def _names(runs: Sequence[Run], group: str) -> list[str]:
    """The component of each run in a group, with the fields in which runs of the same component differ."""
    def fields(run: Run) -> Mapping[str, object]:
        return {key.partition(".")[2]: value for key, value in run.identity.items()
                if key.startswith(f"{group}.") and key != "blend.beta"}

    def varying(run: Run) -> list[str]:
        others = [fields(other) for other in runs if other.component(group) == run.component(group)]
        return sorted({key for other in others for key in other if len({str(each.get(key)) for each in others}) > 1})

    return [" ".join([run.component(group), *(f"{key}={fields(run)[key]}" for key in varying(run) if key in fields(run))])
            for run in runs]


def _points(part: Mapping[float, Sequence[Run]], alone: Sequence[Run]) -> list[_AtBeta]:
    """The points that have problems in common with the runs of the model alone. Seeds are pooled."""
    found = []
    for beta, runs in sorted(part.items()):
        mine, theirs, _ = aligned(*(outcomes([record for run in side for record in run.records]) for side in (runs, alone)))
        if mine.problems:
            found.append((beta, compare(mine, theirs), _agreement(runs, alone)))
    adjusted = holm([paired.p_value for _, paired, _ in found])
    return [_AtBeta(beta, paired, 1.0 if p_value is None else p_value, same)
            for (beta, paired, same), p_value in zip(found, adjusted, strict=True)]


def _agreement(runs: Sequence[Run], alone: Sequence[Run]) -> float | None:
    """The mean share of an answer before it differs from that of the model alone, by problem, chain and seed."""
    answers = {(run.identity.get("seed"), record["problem"], record["chain"]): record["text"]
               for run in alone for record in run.records}
    shares = []
    for run in runs:
        for record in run.records:
            other = answers.get((run.identity.get("seed"), record["problem"], record["chain"]))
            if other is not None:
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(record["text"], other, strict=False)))
                shares.append(same / max(len(record["text"]), len(other), 1) if record["text"] != other else 1.0)
    return sum(shares) / len(shares) if shares else None


def _side(point: _AtBeta) -> str:
    return "away, beta < 0" if point.beta < 0 else "towards, beta > 0"


def _best_table(curves: Sequence[_Curve]) -> ReportTable:
    rows = [{"sampler": curve.sampler, "source": curve.source, "betas": len(curve.points), "beta": curve.best.beta,
             "side": _side(curve.best) if curve.best.gain > 0 else "none: no beta gains",
             **_gain(curve.best), "resolved": "yes" if curve.best.is_resolved and curve.best.gain > 0 else "no"}
            for curve in curves]
    columns = [named("sampler", "sampler"), named("source", "source"), numbered("betas", "betas", "d"),
               numbered("best beta", "beta", "g"), named("sign", "side"), differing("gain", "gain"),
               ReportColumn("p", lambda row: probability(row["p"])), named("resolved", "resolved")]
    return ReportTable("guided_best", "The best beta of each source", columns, rows)


def _table(curves: Sequence[_Curve]) -> ReportTable:
    rows = [{"sampler": curve.sampler, "source": curve.source, "beta": point.beta, **_gain(point),
             "problems": point.paired.difference.n, "agreement": point.agreement}
            for curve in curves for point in curve.points]
    columns = [named("sampler", "sampler"), named("source", "source"), numbered("beta", "beta", "g"),
               differing("gain", "gain"), ReportColumn("p", lambda row: probability(row["p"])),
               numbered("problems", "problems", ",d"), shared("agreement", "agreement")]
    return ReportTable("guided", "Gain over the model alone", columns, rows)


def _gain(point: _AtBeta) -> dict[str, float | None]:
    low, high = point.paired.difference.interval or (None, None)
    return {"gain": point.gain, "gain_low": low, "gain_high": high, "p": point.p_value}


def _panels(curves: Sequence[_Curve], over: str) -> Figure:
    """A panel for each sampler, with a line over beta, or marks over the agreement, for each source."""
    from matplotlib.figure import Figure

    from dflash_mcmc.report.figure import INK

    samplers = list(dict.fromkeys(curve.sampler for curve in curves))[:_MOST_SAMPLERS]
    sources = list(dict.fromkeys(curve.source for curve in curves))[:_MOST_SOURCES]
    drawn = Figure(figsize=(1.2 + 3.4 * len(samplers), 3.9), layout="constrained")
    panels = drawn.subplots(1, len(samplers), sharex=True, sharey=True, squeeze=False)[0]
    for sampler, axes in zip(samplers, panels, strict=True):
        axes.axhline(0.0, color=INK, linewidth=0.9, zorder=1)
        for curve in curves:
            if curve.sampler == sampler and curve.source in sources:
                _draw(axes, curve, sources.index(curve.source), over)
        axes.set_title(sampler)
        axes.set_xlabel("beta" if over == "beta" else "agreement with the model alone, %")
    panels[0].set_ylabel("gain in accuracy, points")
    handles = {label: handle for axes in panels
               for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))
    return drawn


def _draw(axes: Axes, curve: _Curve, number: int, over: str) -> None:
    """The points of a curve with their intervals. Resolved gains are filled; over the agreement each point has its beta."""
    from dflash_mcmc.report.figure import MARKERS, PALETTE, error_bars

    points = [point for point in curve.points if over == "beta" or point.agreement is not None]
    across = [point.beta if over == "beta" else 100.0 * (point.agreement or 0.0) for point in points]
    up, colour, marker = [100.0 * point.gain for point in points], PALETTE[number], MARKERS[number]
    bars = error_bars([point.paired.difference for point in points])
    axes.errorbar(across, up, bars, color=colour, marker=marker,
                  markersize=5.5, markerfacecolor="white", capsize=2, linewidth=1.2, elinewidth=0.8, label=curve.source,
                  linestyle="-" if over == "beta" else "none", zorder=2)
    for x, y, point in zip(across, up, points, strict=True):
        if point.is_resolved:
            axes.plot(x, y, marker, color=colour, markersize=5.5, zorder=3)
        if over != "beta":
            axes.annotate(f"{point.beta:g}", (x, y), (4, 4), textcoords="offset points", fontsize=7, color=colour)
