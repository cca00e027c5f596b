"""Accuracy over the numeric settings that a sweep varies, and the gain of guided targets over the model alone.

A setting has a curve, and a pair of them a heat map. Gains are by sampler and source: over beta, and against the agreement
with the model.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.config.identity import followed, varying
from dflash_mcmc.report import figure, parts, reading
from dflash_mcmc.report.study import ProbeRun, Study, same_but
from dflash_mcmc.statistics.estimates import IntervalEstimate, accuracy, aligned, outcomes, restricted
from dflash_mcmc.statistics.paired import LEVEL, compare, holm, mean_difference, sign_flip

_NO_AXES = ("version", "seed")
_MOST_DRAWN = 8
_NARROWEST = 5.0
"""Smallest range of a map's colours in percentage points, so that noise does not look like structure."""
_TEXT = """
The runs of each table differ only in the settings given in its title; runs that differ only in the seed are pooled. Each
accuracy has its own noise. The best of many runs looks better than it is: repeat it with another seed.
"""


class _Swept(NamedTuple):
    """Runs that differ only in one or two numeric settings, and in the seed."""

    title: str
    over: list[str]
    """Short names of the settings, `alpha` for `sampler.alpha`: their columns in the rows."""
    rows: list[dict[str, Any]]
    """A row for each point, in ascending order of the settings. Records of all seeds count as chains of the same problems."""
    runs: set[int]
    """The ids of the runs."""


def section(study: Study) -> parts.Section | None:
    """Tables and figures. The runs in one of them differ only in the settings that it shows and in the seed."""
    values: dict[str, set] = {}
    for run in study.runs:
        for key, value in run.identity.items():
            if key not in _NO_AXES and isinstance(value, (int, float)) and not isinstance(value, bool):
                values.setdefault(key, set()).add(value)
    axes = sorted((key for key, found in values.items() if len(found) > 1),
                  key=lambda key: (not key.startswith("sampler."), not key.startswith("blend.")))

    every = [swept for pair in itertools.combinations(axes, 2) for swept in _parted(study.runs, pair)
             if min(sizes := [len({row[name] for row in swept.rows}) for name in swept.over]) > 1
             and len(swept.rows) > max(sizes)]  # not only a diagonal
    drawn = [swept.runs for swept in every]
    every += [swept for axis in axes for swept in _parted(study.runs, (axis,))  # a curve may be a row of a map
              if len(swept.rows) > 1 and not any(swept.runs <= of_map for of_map in drawn)]
    if not every:
        return None
    names = ["_".join(["heatmap" if len(swept.over) == 2 else "sweep", *swept.over]) for swept in every]
    again = [names[:place].count(name) for place, name in enumerate(names)]
    tables, drawings = list[parts.ReportTable](), list[parts.Drawing]()
    for swept, name, number in zip(every, names, again, strict=True):
        shown, over = f"{name}_{number + 1}" if number else name, " and ".join(swept.over)
        tables.append(parts.ReportTable(shown, f"{swept.title}, over {over}", {
            **{axis: axis for axis in swept.over}, "accuracy": ("accuracy", "share"), "samples": ("n", "count"),
            "runs": ("runs", "count"), "MH accept": ("acceptance", "share"),
            "token-forwards per sample": ("token_forwards", ",.0f"), "state": "state"}, swept.rows))
        drawings.append(parts.Drawing(f"fig_{shown}", f"{swept.title}: accuracy over {over}.",
                                      partial(_map if len(swept.over) == 2 else _curve, *swept[:3])))
    more = len(drawings) - _MOST_DRAWN
    text = [*parts.paragraphs(_TEXT), *([f"{more} more have a table but no figure."] if more > 0 else [])]
    return parts.Section("swept", "Swept settings", text, tables, drawings[:_MOST_DRAWN])


def _parted(runs: Sequence[reading.Run], axes: tuple[str, ...]) -> list[_Swept]:
    """The runs that have these axes, in groups. The runs of a group differ only in the axes and in the seed."""
    groups: dict[str, dict[tuple[float, ...], list[reading.Run]]] = {}
    for run in runs:
        values = tuple(run.identity[axis] for axis in axes if isinstance(run.identity.get(axis), (int, float)))
        if len(values) == len(axes):
            rest = {key: value for key, value in followed(run.identity).items() if key not in (*axes, "seed")}
            groups.setdefault(json.dumps(rest, sort_keys=True), {}).setdefault(values, []).append(run)
    names = [axis.rpartition(".")[2] for axis in axes]
    names, swept = names if len({*names}) == len(names) else list(axes), []
    for part in groups.values():
        rows, points = list[dict[str, Any]](), sorted(part.items())
        for values, alike in points:
            records = [record for run in alike for record in run.records]
            proposals, found = sum(record["proposals"] for record in records), accuracy(records)
            rows.append({**dict(zip(names, values, strict=True)), **found.columns("accuracy"), "n": found.n,
                         "runs": len(alike), "state": "complete" if all(run.complete for run in alike) else "interrupted",
                         "acceptance": sum(record["accepted"] for record in records) / proposals if proposals else None,
                         "token_forwards": sum(record["token_forwards"] for record in records) / len(records)})
        first = points[0][1][0]
        swept.append(_Swept(f"{first.experiment}: {first.label_without(names)}", names, rows, {
            id(run) for alike in part.values() for run in alike}))
    return swept


def _map(title: str, over: list[str], rows: list[dict[str, Any]]) -> "figure.Figure":
    down, across = (sorted({row[axis] for row in rows}) for axis in over)
    cells = np.full((len(down), len(across)), np.nan)
    for row in rows:
        cells[down.index(row[over[0]]), across.index(row[over[1]])] = 100.0 * row["accuracy"]
    middle, half = (np.nanmin(cells) + np.nanmax(cells)) / 2, max(_NARROWEST, np.nanmax(cells) - np.nanmin(cells)) / 2
    drawn, (axes,) = figure.panels((2.6 + 1.15 * len(across), 1.7 + 0.62 * len(down)))
    # Cividis can be read by colour-blind readers, and in greyscale from dark to light.
    image = axes.pcolormesh(np.ma.masked_invalid(cells), cmap="cividis", vmin=middle - half, vmax=middle + half,
                            edgecolors="white", linewidth=1.5)
    for row in rows:
        place, value = (across.index(row[over[1]]) + 0.5, down.index(row[over[0]]) + 0.5), 100.0 * row["accuracy"]
        interval = [f"{100.0 * end:.0f}" for end in IntervalEstimate.of(row, "accuracy").interval or ()]
        axes.text(*place, f"{value:.1f}\n[{', '.join(interval)}]\nn {row['n']:,}", ha="center", va="center", fontsize=7.5,
                  color="#010101" if value > middle + 0.1 * half else "#fefefe")  # not the page's colours
    axes.set_yticks(np.arange(len(down)) + 0.5, [f"{value:g}" for value in down])
    axes.set_xticks(np.arange(len(across)) + 0.5, [f"{value:g}" for value in across])
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.set(ylabel=over[0], xlabel=over[1], title=title)
    drawn.colorbar(image, ax=axes, label="correct answers, %")
    return drawn


def _curve(title: str, over: list[str], rows: list[dict[str, Any]]) -> "figure.Figure":
    drawn, (axes,) = figure.panels((4.8, 3.2))
    places = [row[over[0]] for row in rows]
    axes.errorbar(places, [100.0 * row["accuracy"] for row in rows], figure.bars_of(rows, "accuracy", 100.0),
                  color=figure.RIGHT, marker="o", capsize=3)
    axes.set_xticks(places, [f"{value:g}" for value in places])
    axes.set(title=title, ylabel="correct answers, %",
             xlabel=f"{over[0]}; n = {min(row['n'] for row in rows):,} samples or more each")
    return drawn


_MOST_SAMPLERS, _MOST_SOURCES = 4, 7
_ACROSS = {"beta": "beta", "agreement": "agreement with the model alone, %", "kl": "KL(final, other) on hard tokens, nats"}
_GUIDED_TEXT = """
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
same model and dataset has read: {folders}. KL 0 and correlation 1 are agreement. Unlike the shared beginning, they are of the
source itself, whatever beta and sampler. The figure shows KL; a source that the probe has not read is in the table alone.
"""


def guided_section(study: Study) -> parts.Section | None:
    """A table of the best beta of each source and sampler, one of all points, and two figures. None for fewer than two points.

    A source has a curve over beta if a run of the model alone is beside it.
    """
    groups: dict[tuple[str, str], dict[float, list[reading.Run]]] = {}
    for run in study.runs:
        beta = run.identity.get("blend.beta")
        if isinstance(beta, (int, float)) and beta != 0:
            rest = {key: value for key, value in run.identity.items() if key not in ("seed", "blend.beta")}
            source = {key: rest.pop(key) for key in list(rest) if key.partition(".")[0] == "blend"}
            name = json.dumps(rest, sort_keys=True), json.dumps(source, sort_keys=True)
            groups.setdefault(name, {}).setdefault(float(beta), []).append(run)
    firsts = [next(iter(part.values()))[0] for part in groups.values()]
    rows, best, read = list[dict[str, Any]](), list[dict[str, Any]](), list[dict]()
    for sampler, source_name, first, part in zip(_names(firsts, "sampler"), _names(firsts, "blend"), firsts, groups.values(),
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
    drawings = [parts.Drawing("fig_gain_over_beta", "Gain over the model alone by beta, for each sampler and source.",
                              partial(_gain_figure, rows, "beta")),
                parts.Drawing("fig_gain_over_agreement", f"Gain over the model alone against the {words}.",
                              partial(_gain_figure, rows, over))]
    folders = [probe.folder.name for probe in study.probes if any(row in _rows(probe) for row in read)]
    text = _GUIDED_TEXT + (_PROBED.format(folders=", ".join(folders)) if folders else "")
    columns = {"sampler": "sampler", "source": "source"}
    tables = [parts.ReportTable("guided_best", "The best beta of each source", {
        **columns, "betas": ("betas", "d"), "best beta": ("beta", "g"), "gain": ("gain", "points"), "p": ("p", "p"),
        "resolved": "resolved", "trend, points per 0.1": ("trend", "points"), "p of the trend": ("p_trend", "p"),
        "of problems": ("problems", ",d")}, best), parts.ReportTable("guided", "Gain over the model alone", {
            **columns, "beta": ("beta", "g"), "gain": ("gain", "points"), "p": ("p", "p"), "problems": ("problems", ",d"),
            "agreement": ("agreement", "share"),
            **({"KL, nats": ("kl", ".3g"), "rank correlation": ("rank_correlation", ".3g")} if read else {})}, rows)]
    return parts.Section("guided", "Guided targets", parts.paragraphs(text), tables, drawings)


def _rows(probe: ProbeRun) -> list[dict]:
    return probe.summary["tables"].get("agreement", [])


def _probed(run: reading.Run, probes: Sequence[ProbeRun]) -> dict | None:
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
    apart = ("blend.beta", "blend.alpha_mask")
    return {key: value for key, value in identity.items() if key.partition(".")[0] == "blend" and key not in apart}


def _names(runs: Sequence[reading.Run], group: str) -> list[str]:
    """The component of each run in a group, with the fields in which runs of the same component differ."""
    of = [(run.component(group), {key.partition(".")[2]: value for key, value in run.identity.items()
                                  if key.startswith(f"{group}.") and key != "blend.beta"}) for run in runs]
    return [" ".join([name, *(f"{key}={own[key]}" for key in varying([other for alike, other in of if alike == name])
                              if key in own)]) for name, own in of]


def _points(part: Mapping[float, Sequence[reading.Run]], alone: Sequence[reading.Run]) -> list[dict[str, Any]]:
    """A row for each beta that has problems in common with the runs of the model alone. Seeds are pooled."""
    answers = {(run.identity.get("seed"), record["problem"], record["chain"]): record["text"]
               for run in alone for record in run.records}
    found = []
    for beta, runs in sorted(part.items()):
        mine, theirs, _ = aligned(*(outcomes([record for run in side for record in run.records]) for side in (runs, alone)))
        if not mine.problems:
            continue
        shares = []  # of an answer before it differs from that of the model alone, by seed, problem and chain
        for run in runs:
            for record in run.records:
                other = answers.get((run.identity.get("seed"), record["problem"], record["chain"]))
                if other is not None:
                    longest = max(len(record["text"]), len(other), 1)
                    shares.append(_shared(record["text"], other) / longest if record["text"] != other else 1.0)
        found.append((beta, compare(mine, theirs), sum(shares) / len(shares) if shares else None))
    adjusted = holm([paired.p_value for _, paired, _ in found])
    return [{"beta": beta, **paired.difference.columns("gain"), "p": p_value, "problems": paired.difference.n,
             "agreement": same} for (beta, paired, same), p_value in zip(found, adjusted, strict=True)]


def _trend(runs_at: Mapping[float, Sequence[reading.Run]]) -> tuple[IntervalEstimate, float | None]:
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


def _shared(a: str, b: str) -> int:
    """The number of characters before two texts differ, by halving: texts are compared faster than characters."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _gain_figure(rows: Sequence[dict[str, Any]], over: str) -> "figure.Figure":
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
            axes.errorbar(across, up, figure.bars_of(points, "gain", 100.0), color=colour, marker=marker, markersize=5.5,
                          markerfacecolor="white", capsize=2, elinewidth=0.8, label=source, linestyle="none", zorder=2)
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
