"""Accuracy over the numeric settings that a sweep varies: a curve for each, a heat map for each pair."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_mcmc.config.identity import followed
from dflash_mcmc.report import figure
from dflash_mcmc.report.parts import Drawing, ReportTable, Section, paragraphs
from dflash_mcmc.report.reading import Run
from dflash_mcmc.report.study import Study
from dflash_mcmc.statistics.intervals import IntervalEstimate
from dflash_mcmc.statistics.outcomes import accuracy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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

    axes: tuple[str, ...]
    """Names of the settings: `sampler.alpha`."""
    runs: dict[tuple[float, ...], list[Run]]
    """The runs at each point, by the values of the axes in ascending order. Runs at the same point differ only in the seed."""

    @property
    def title(self) -> str:
        first = next(iter(self.runs.values()))[0]
        return f"{first.experiment}: {first.condition}"

    @property
    def over(self) -> list[str]:
        """Short names of the axes: `alpha` for `sampler.alpha`."""
        names = [axis.rpartition(".")[2] for axis in self.axes]
        return names if len({*names}) == len(names) else list(self.axes)

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for each point. The records of all seeds count as further chains of the same problems."""
        rows = []
        for values, runs in self.runs.items():
            records = [record for run in runs for record in run.records]
            proposals, found = sum(record["proposals"] for record in records), accuracy(records)
            rows.append({**dict(zip(self.over, values, strict=True)), **found.columns("accuracy"), "n": found.n,
                         "runs": len(runs), "state": "complete" if all(run.complete for run in runs) else "interrupted",
                         "acceptance": sum(record["accepted"] for record in records) / proposals if proposals else None,
                         "token_forwards": sum(record["token_forwards"] for record in records) / len(records)})
        return rows


def section(study: Study) -> Section | None:
    """Tables and figures. The runs in one of them differ only in the settings that it shows and in the seed."""
    values: dict[str, set] = {}
    for run in study.runs:
        for key, value in run.identity.items():
            if key not in _NO_AXES and isinstance(value, (int, float)) and not isinstance(value, bool):
                values.setdefault(key, set()).add(value)
    axes = sorted((key for key, found in values.items() if len(found) > 1),
                  key=lambda key: (not key.startswith("sampler."), not key.startswith("blend.")))

    def is_grid(swept: _Swept) -> bool:  # not only a diagonal
        sizes = [len({point[axis] for point in swept.runs}) for axis in (0, 1)]
        return min(sizes) > 1 and len(swept.runs) > max(sizes)

    maps = [swept for pair in itertools.combinations(axes, 2) for swept in _parted(study.runs, pair) if is_grid(swept)]
    drawn = [{id(run) for runs in grid.runs.values() for run in runs} for grid in maps]  # a curve may be a row of a map
    curves = [swept for axis in axes for swept in _parted(study.runs, (axis,)) if len(swept.runs) > 1
              and not any({id(run) for runs in swept.runs.values() for run in runs} <= ids for ids in drawn)]
    every = [*maps, *curves]
    if not every:
        return None
    names = ["_".join(["heatmap" if len(swept.axes) == 2 else "sweep", *swept.over]) for swept in every]
    again = [names[:place].count(name) for place, name in enumerate(names)]
    tables, drawings = list[ReportTable](), list[Drawing]()
    for swept, name, number in zip(every, names, again, strict=True):
        shown, rows, over = f"{name}_{number + 1}" if number else name, swept.table, " and ".join(swept.over)
        tables.append(ReportTable(shown, f"{swept.title}, over {over}", {
            **{axis: axis for axis in swept.over}, "accuracy": ("accuracy", "share"), "samples": ("n", "count"),
            "runs": ("runs", "count"), "MH accept": ("acceptance", "share"),
            "token-forwards per sample": ("token_forwards", ",.0f"), "state": "state"}, rows))
        drawings.append(Drawing(f"fig_{shown}", f"{swept.title}: accuracy over {over}.",
                                partial(_map if len(swept.axes) == 2 else _curve, swept.title, swept.over, rows)))
    more = len(drawings) - _MOST_DRAWN
    text = [*paragraphs(_TEXT), *([f"{more} more have a table but no figure."] if more > 0 else [])]
    return Section("swept", "Swept settings", text, tables, drawings[:_MOST_DRAWN])


def _parted(runs: Sequence[Run], axes: tuple[str, ...]) -> list[_Swept]:
    """The runs that have these axes, in groups. The runs of a group differ only in the axes and in the seed."""
    parts: dict[str, dict[tuple[float, ...], list[Run]]] = {}
    for run in runs:
        values = tuple(run.identity[axis] for axis in axes if isinstance(run.identity.get(axis), (int, float)))
        if len(values) == len(axes):
            rest = {key: value for key, value in followed(run.identity).items() if key not in (*axes, "seed")}
            parts.setdefault(json.dumps(rest, sort_keys=True), {}).setdefault(values, []).append(run)
    return [_Swept(axes, dict(sorted(part.items()))) for part in parts.values()]


def _map(title: str, over: list[str], rows: list[dict[str, Any]]) -> Figure:
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


def _curve(title: str, over: list[str], rows: list[dict[str, Any]]) -> Figure:
    drawn, (axes,) = figure.panels((4.8, 3.2))
    places, estimates = [row[over[0]] for row in rows], [IntervalEstimate.of(row, "accuracy") for row in rows]
    axes.errorbar(places, [100.0 * estimate.known for estimate in estimates], figure.error_bars(estimates), color=figure.RIGHT,
                  marker="o", capsize=3)
    axes.set_xticks(places, [f"{value:g}" for value in places])
    axes.set(title=title, ylabel="correct answers, %",
             xlabel=f"{over[0]}; n = {min(row['n'] for row in rows):,} samples or more each")
    return drawn
