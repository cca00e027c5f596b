"""Gain of guided targets over the model alone, by sampler and source: over beta, and against the agreement with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_mcmc.report import figure
from dflash_mcmc.report.parts import Drawing, ReportTable, Section, paragraphs
from dflash_mcmc.report.reading import Run
from dflash_mcmc.report.study import ProbeRun, Study, same_but
from dflash_mcmc.statistics.intervals import IntervalEstimate
from dflash_mcmc.statistics.outcomes import aligned, outcomes, restricted
from dflash_mcmc.statistics.paired import LEVEL, compare, holm, mean_difference, sign_flip

if TYPE_CHECKING:
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


def section(study: Study) -> Section | None:
    """A table of the best beta of each source and sampler, one of all points, and two figures. None for fewer than two points.

    A source has a curve over beta if a run of the model alone is beside it.
    """
    parts: dict[tuple[str, str], dict[float, list[Run]]] = {}
    for run in study.runs:
        beta = run.identity.get("blend.beta")
        if isinstance(beta, (int, float)) and beta != 0:
            rest = {key: value for key, value in run.identity.items() if key not in ("seed", "blend.beta")}
            source = {key: rest.pop(key) for key in list(rest) if key.partition(".")[0] == "blend"}
            name = json.dumps(rest, sort_keys=True), json.dumps(source, sort_keys=True)
            parts.setdefault(name, {}).setdefault(float(beta), []).append(run)
    firsts = [next(iter(part.values()))[0] for part in parts.values()]
    rows, best, read = list[dict[str, Any]](), list[dict[str, Any]](), list[dict]()
    for sampler, source_name, first, part in zip(_names(firsts, "sampler"), _names(firsts, "blend"), firsts, parts.values(),
                                                 strict=True):
        alone = [run for run in study.runs if run.identity.get("blend.beta", 0) == 0 and run.component("draft") in (
            "none", first.component("draft")) and same_but(run, first, "blend", "seed", "draft")]
        if not (points := _points(part, alone)):
            continue
        probed = _probed(first, study.probes)
        read += [probed] if probed else []
        measured = {f"{name}{end}": (probed or {}).get(f"{name}{end}")
                    for name in ("kl", "rank_correlation") for end in ("", "_low", "_high")}
        of = {"sampler": sampler, "source": source_name}
        rows += [{**of, **point, **measured} for point in points]
        top = max(points, key=lambda point: (point["gain"], -abs(point["beta"])))
        trend, p_trend = _trend({0.0: alone, **{point["beta"]: part[point["beta"]] for point in points}})
        best.append({**of, "betas": len(points), **{key: top[key] for key in ("beta", "gain", "gain_low", "gain_high", "p")},
                     "resolved": "yes" if top["p"] <= LEVEL and top["gain"] > 0 else "no", **trend.columns("trend"),
                     "p_trend": p_trend, "problems": trend.n})
    if len(rows) < 2:
        return None
    over, words = ("kl", "KL of the source on hard tokens, of a probe") if any(row["kl"] for row in rows) else (
        "agreement", "agreement of the answers with its own: the shared beginning")
    drawings = [Drawing("fig_gain_over_beta", "Gain over the model alone by beta, for each sampler and source.",
                        partial(_figure, rows, "beta")),
                Drawing("fig_gain_over_agreement", f"Gain over the model alone against the {words}.",
                        partial(_figure, rows, over))]
    folders = [probe.folder.name for probe in study.probes if any(row in _rows(probe) for row in read)]
    text = _TEXT + (_PROBED.format(folders=", ".join(folders)) if folders else "")
    columns = {"sampler": "sampler", "source": "source"}
    tables = [ReportTable("guided_best", "The best beta of each source", {
        **columns, "betas": ("betas", "d"), "best beta": ("beta", "g"), "gain": ("gain", "points"), "p": ("p", "p"),
        "resolved": "resolved", "trend, points per 0.1": ("trend", "points"), "p of the trend": ("p_trend", "p"),
        "of problems": ("problems", ",d")}, best), ReportTable("guided", "Gain over the model alone", {
            **columns, "beta": ("beta", "g"), "gain": ("gain", "points"), "p": ("p", "p"), "problems": ("problems", ",d"),
            "agreement": ("agreement", "share"),
            **({"KL, nats": ("kl", ".3g"), "rank correlation": ("rank_correlation", ".3g")} if read else {})}, rows)]
    return Section("guided", "Guided targets", paragraphs(text), tables, drawings)


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


def _points(part: Mapping[float, Sequence[Run]], alone: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each beta that has problems in common with the runs of the model alone. Seeds are pooled."""
    found = []
    for beta, runs in sorted(part.items()):
        mine, theirs, _ = aligned(*(outcomes([record for run in side for record in run.records]) for side in (runs, alone)))
        if mine.problems:
            found.append((beta, compare(mine, theirs), _agreement(runs, alone)))
    adjusted = holm([paired.p_value for _, paired, _ in found])
    return [{"beta": beta, **paired.difference.columns("gain"), "p": p_value, "problems": paired.difference.n,
             "agreement": same} for (beta, paired, same), p_value in zip(found, adjusted, strict=True)]


def _trend(runs_at: Mapping[float, Sequence[Run]]) -> tuple[IntervalEstimate, float | None]:
    """The slope of accuracy over beta on the problems that all betas have, and its p-value; without such problems neither."""
    sides = [outcomes([record for run in runs for record in run.records]) for runs in runs_at.values()]
    problems = sorted(set.intersection(*(set(side.problems) for side in sides)))
    if not problems:
        return IntervalEstimate(), None
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


def _figure(rows: Sequence[dict[str, Any]], over: str) -> Figure:
    """A panel for each sampler, with a line over beta, or marks over the agreement or KL, for each source.

    Points have their intervals, and resolved gains are filled. Over the agreement each point has its beta.
    """
    samplers, sources = (list(dict.fromkeys(row[key] for row in rows))[:most]
                         for key, most in (("sampler", _MOST_SAMPLERS), ("source", _MOST_SOURCES)))
    drawn, panels = figure.panels((1.2 + 3.4 * len(samplers), 3.9), 1, len(samplers), sharex=True, sharey=True)
    for sampler, axes in zip(samplers, panels, strict=True):
        axes.axhline(0.0, color=figure.INK, linewidth=0.9, zorder=1)
        for source, colour, marker in zip(sources, figure.PALETTE, figure.MARKERS, strict=False):
            points = [row for row in rows if (row["sampler"], row["source"]) == (sampler, source) and row[over] is not None]
            if not points:
                continue
            across = [100.0 * row[over] if over == "agreement" else row[over] for row in points]
            up = [100.0 * row["gain"] for row in points]
            bars = figure.error_bars([IntervalEstimate.of(row, "gain") for row in points])
            axes.errorbar(across, up, bars, color=colour, marker=marker, markersize=5.5, markerfacecolor="white", capsize=2,
                          elinewidth=0.8, label=source, linestyle="none", zorder=2)
            if over == "beta":  # the model alone is a point of the line
                line = sorted([(0.0, 0.0), *zip(across, up, strict=True)])
                axes.plot(*zip(*line, strict=True), color=colour, linewidth=1.2, zorder=2)
            for x, y, row in zip(across, up, points, strict=True):
                if row["p"] <= LEVEL:
                    axes.plot(x, y, marker, color=colour, markersize=5.5, zorder=3)
                if over != "beta":
                    axes.annotate(f"{row['beta']:g}", (x, y), (4, 4), textcoords="offset points", fontsize=7, color=colour)
        axes.set(title=sampler, xlabel=_ACROSS[over])
        if over == "kl":
            axes.set_xscale("log")
            figure.plain_ticks(axes)
            axes.margins(x=0.2)
        else:
            axes.locator_params(axis="x", nbins=5)
    panels[0].set_ylabel("gain in accuracy, points")
    figure.legend_below(drawn, min(2 * len(samplers), 4))
    return drawn
