"""Gain of guided targets over the model alone, by sampler and source: over beta, and against the agreement with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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
from dflash_mcmc.report.study import ProbeRun, Study, same_but
from dflash_mcmc.statistics.intervals import IntervalEstimate
from dflash_mcmc.statistics.outcomes import aligned, outcomes, restricted
from dflash_mcmc.statistics.paired import LEVEL, Paired, compare, holm, mean_difference, sign_flip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_SAMPLERS, _MOST_SOURCES = 4, 7
_ACROSS = {"beta": "beta", "agreement": "agreement with the model alone, %", "kl": "KL(final, other) on hard tokens, nats"}
_TEXT = """
guided = (1 - beta) * final + beta * other. The gain is the accuracy at a beta minus that of the model alone (blend=none, or
beta 0), with the same sampler on the same problems. Intervals are those of one comparison. p is of the exact paired test,
adjusted for all betas of a curve (Holm), since the best of several betas looks better than it is. A gain is resolved if this p
is at most 0.05; its point is filled. The trend is the slope of accuracy over beta, with the model alone at beta 0: a mean over
problems of the slope of each, whose p is of sign flips. It uses all betas at once and is one test of a curve.

Agreement is the share of an answer's characters before it first differs from the answer of the model alone, a mean over the
answers. A source that agrees changes nothing; one that helps while it agrees little is complementary. Samplers that draw at
random differ sooner than greedy decoding does.
"""
_PROBED = """
KL(final, other) and the rank correlation of the vocabulary are means over the hard tokens of the answers that a probe of the
same model and dataset has read: {folders}. KL 0 and correlation 1 are agreement. Unlike the shared beginning, they are of
the source itself, whatever beta and sampler. The figure shows KL; a source that the probe has not read is in the table alone.
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
    trend: IntervalEstimate
    """Slope of accuracy over beta, as a share per 0.1."""
    p_trend: float | None
    probed: Mapping[str, float | None] | None
    """What a probe says of the source, a row of its table `agreement`; None without one."""

    @property
    def kl(self) -> float | None:
        """KL(final, other) on hard tokens, nats; None if no probe has it."""
        return None if self.probed is None else self.probed["kl"]

    @property
    def best(self) -> _AtBeta:
        """The point of the largest gain; of several, that with the beta closest to 0."""
        return max(self.points, key=lambda point: (point.gain, -abs(point.beta)))


def section(study: Study) -> Section | None:
    """A table of the best beta of each source and sampler, one of all points, and two figures."""
    curves = _curves(study)
    if max((len(curve.points) for curve in curves), default=0) < 2 and len(curves) < 2:
        return None
    over, words = ("kl", "KL of the source on hard tokens, of a probe") if any(curve.kl for curve in curves) else (
        "agreement", "agreement of the answers with its own: the shared beginning")
    drawings = [Drawing("fig_gain_over_beta", "Gain over the model alone by beta, for each sampler and source.",
                        partial(_panels, curves, "beta")),
                Drawing("fig_gain_over_agreement", f"Gain over the model alone against the {words}.",
                        partial(_panels, curves, over))]
    text = _TEXT
    if folders := [probe.folder.name for probe in study.probes if any(curve.probed in _rows(probe) for curve in curves)]:
        text += _PROBED.format(folders=", ".join(folders))
    return Section("guided", "Guided targets", paragraphs(text), [_best_table(curves), _table(curves)], drawings)


def _rows(probe: ProbeRun) -> list[dict]:
    return probe.summary["tables"].get("agreement", [])


def _probed(run: Run, probes: Sequence[ProbeRun]) -> dict | None:
    """What the first probe that read the source of this run's blend says of it; None if none did.

    Either the probe has the same blend, or its row is the blend's layer or draft. Any field of a blend makes another source,
    but for its share, its mask, and what is mixed.
    """
    source = _source_of(run.identity)
    for probe in probes:
        groups = ("model", "draft") if run.component("draft") != "none" else ("model",)
        same = all(run.identity.get(key) == value for key, value in probe.identity.items()
                   if key.partition(".")[0] in groups or key in ("dataset", "dataset.content"))
        for row in _rows(probe) if same else []:
            own = {"blend": row["source"], "blend.layer": row["layer"],
                   "blend.norm": source.get("blend.norm") and probe.identity.get("probe.norm")}
            found = {key: value for key, value in own.items() if value is not None}
            if source == (_source_of(probe.identity) if row["source"] == "blend" else found):
                return row
    return None


def _source_of(identity: Mapping[str, object]) -> dict[str, object]:
    """The fields of a blend that say what it mixes in."""
    apart = ("blend.grid", "blend.beta", "blend.alpha_mask", "blend.space")
    return {key: value for key, value in identity.items() if key.partition(".")[0] == "blend" and key not in apart}


def _curves(study: Study) -> list[_Curve]:
    """The curves of all sources that have a run of the model alone beside them."""
    runs = study.runs
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
            trend = _trend({0.0: alone, **{point.beta: part[point.beta] for point in points}})
            curves.append(_Curve(names[0][place], names[1][place], points, *trend, _probed(firsts[place], study.probes)))
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


def _trend(runs_at: Mapping[float, Sequence[Run]]) -> tuple[IntervalEstimate, float | None]:
    """The slope of accuracy over beta on the problems that all betas have, and its p-value; without such problems neither."""
    sides = [outcomes([record for run in runs for record in run.records]) for runs in runs_at.values()]
    problems = sorted(set.intersection(*(set(side.problems) for side in sides)))
    if not problems:
        return IntervalEstimate(None, None, None, 0), None
    betas = np.array([*runs_at]) - np.mean([*runs_at])
    slopes = betas @ np.stack([restricted(side, problems).correct for side in sides]) / np.maximum(betas, 0.0).sum()
    widest = 0.1 * np.maximum(betas, 0.0).sum() / (betas @ betas)  # of a problem
    estimate = mean_difference(slopes, int(min(side.chains.min() for side in sides)))
    return estimate.mapped(lambda value: float(widest * value)), sign_flip(slopes)


def _agreement(runs: Sequence[Run], alone: Sequence[Run]) -> float | None:
    """The mean share of an answer before it differs from that of the model alone, by problem, chain and seed."""
    answers = {(run.identity.get("seed"), record["problem"], record["chain"]): record["text"]
               for run in alone for record in run.records}
    shares = []
    for run in runs:
        for record in run.records:
            other = answers.get((run.identity.get("seed"), record["problem"], record["chain"]))
            if other is not None:
                longest = max(len(record["text"]), len(other), 1)
                shares.append(_shared(record["text"], other) / longest if record["text"] != other else 1.0)
    return sum(shares) / len(shares) if shares else None


def _shared(a: str, b: str) -> int:
    """The number of characters before two texts differ, by halving: texts are compared faster than characters."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _best_table(curves: Sequence[_Curve]) -> ReportTable:
    rows = [{"sampler": curve.sampler, "source": curve.source, "betas": len(curve.points), "beta": curve.best.beta,
             **_gain(curve.best), "resolved": "yes" if curve.best.is_resolved and curve.best.gain > 0 else "no",
             **curve.trend.columns("trend"), "p_trend": curve.p_trend, "problems": curve.trend.n}
            for curve in curves]
    columns = [named("sampler", "sampler"), named("source", "source"), numbered("betas", "betas", "d"),
               numbered("best beta", "beta", "g"), differing("gain", "gain"),
               ReportColumn("p", lambda row: probability(row["p"])), named("resolved", "resolved"),
               differing("trend, points per 0.1", "trend"),
               ReportColumn("p of the trend", lambda row: probability(row["p_trend"])),
               numbered("of problems", "problems", ",d")]
    return ReportTable("guided_best", "The best beta of each source", columns, rows)


def _table(curves: Sequence[_Curve]) -> ReportTable:
    rows = [{"sampler": curve.sampler, "source": curve.source, "beta": point.beta, **_gain(point),
             "problems": point.paired.difference.n, "agreement": point.agreement, **_measured(curve)}
            for curve in curves for point in curve.points]
    columns = [named("sampler", "sampler"), named("source", "source"), numbered("beta", "beta", "g"),
               differing("gain", "gain"), ReportColumn("p", lambda row: probability(row["p"])),
               numbered("problems", "problems", ",d"), shared("agreement", "agreement"),
               *([numbered("KL, nats", "kl"), numbered("rank correlation", "rank_correlation")]
                 if any(curve.probed for curve in curves) else [])]
    return ReportTable("guided", "Gain over the model alone", columns, rows)


def _measured(curve: _Curve) -> dict[str, float | None]:
    """The columns of a probe's agreement, with the ends of their intervals."""
    probed = curve.probed or {}
    return {f"{name}{end}": probed.get(f"{name}{end}") for name in ("kl", "rank_correlation") for end in ("", "_low", "_high")}


def _gain(point: _AtBeta) -> dict[str, float | None]:
    low, high = point.paired.difference.interval or (None, None)
    return {"gain": point.gain, "gain_low": low, "gain_high": high, "p": point.p_value}


def _panels(curves: Sequence[_Curve], over: str) -> Figure:
    """A panel for each sampler, with a line over beta, or marks over the agreement or KL, for each source."""
    from matplotlib.figure import Figure

    from dflash_mcmc.report.figure import INK, plain_ticks

    samplers = list(dict.fromkeys(curve.sampler for curve in curves))[:_MOST_SAMPLERS]
    sources = list(dict.fromkeys(curve.source for curve in curves))[:_MOST_SOURCES]
    drawn = Figure(figsize=(1.2 + 3.4 * len(samplers), 3.9), layout="constrained")
    panels = drawn.subplots(1, len(samplers), sharex=True, sharey=True, squeeze=False)[0]
    for sampler, axes in zip(samplers, panels, strict=True):
        axes.axhline(0.0, color=INK, linewidth=0.9, zorder=1)
        for curve in curves:
            if curve.sampler == sampler and curve.source in sources and (over != "kl" or curve.kl is not None):
                _draw(axes, curve, sources.index(curve.source), over)
        axes.set_title(sampler)
        axes.set_xlabel(_ACROSS[over])
        if over == "kl":
            axes.set_xscale("log")
            plain_ticks(axes)
            axes.margins(x=0.2)
        else:
            axes.locator_params(axis="x", nbins=5)
    panels[0].set_ylabel("gain in accuracy, points")
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(2 * len(samplers), 4, len(handles)))
    return drawn


def _draw(axes: Axes, curve: _Curve, number: int, over: str) -> None:
    """The points of a curve with their intervals. Resolved gains are filled; over the agreement each point has its beta."""
    from dflash_mcmc.report.figure import MARKERS, PALETTE, error_bars

    places = {"beta": lambda point: point.beta, "kl": lambda point: curve.kl,
              "agreement": lambda point: point.agreement and 100.0 * point.agreement}
    points = [point for point in curve.points if places[over](point) is not None]
    across = [places[over](point) for point in points]
    up, colour, marker = [100.0 * point.gain for point in points], PALETTE[number], MARKERS[number]
    bars = error_bars([point.paired.difference for point in points])
    axes.errorbar(across, up, bars, color=colour, marker=marker, markersize=5.5, markerfacecolor="white", capsize=2,
                  elinewidth=0.8, label=curve.source, linestyle="none", zorder=2)
    if over == "beta":  # the model alone is a point of the line
        line = sorted([(0.0, 0.0), *zip(across, up, strict=True)])
        axes.plot(*zip(*line, strict=True), color=colour, linewidth=1.2, zorder=2)
    for x, y, point in zip(across, up, points, strict=True):
        if point.is_resolved:
            axes.plot(x, y, marker, color=colour, markersize=5.5, zorder=3)
        if over != "beta":
            axes.annotate(f"{point.beta:g}", (x, y), (4, 4), textcoords="offset points", fontsize=7, color=colour)
