"""Accuracy over the numeric settings that a sweep varies: a curve for each, a heat map for each pair."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.config.identity import followed
from dflash_mcmc.report.parts import Drawing, ReportTable, Section, accurate, counted, named, numbered, paragraphs, shared
from dflash_mcmc.report.reading import Run
from dflash_mcmc.report.study import Study
from dflash_mcmc.statistics.intervals import IntervalEstimate
from dflash_mcmc.statistics.outcomes import accuracy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.store.records import Record

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
    runs: dict[tuple[float, ...], list[Run]]
    """The runs at each point, by the values of the axes in ascending order. Runs at the same point differ only in the seed."""

    @property
    def title(self) -> str:
        first = next(iter(self.runs.values()))[0]
        return f"{first.experiment}: {first.condition}"

    @property
    def over(self) -> list[str]:
        """Short names of the axes: `alpha` for `sampler.alpha`."""
        return [axis.rpartition(".")[2] for axis in self.axes]

    def records(self, values: tuple[float, ...]) -> list[Record]:
        """The records of all seeds at one point. They count as further chains of the same problems."""
        return [record for run in self.runs[values] for record in run.records]

    def at(self, values: tuple[float, ...]) -> IntervalEstimate:
        """The accuracy at one point."""
        return accuracy(self.records(values))


def section(study: Study) -> Section | None:
    """Tables and figures. The runs in one of them differ only in the settings that it shows and in the seed."""
    axes = _axes(study.runs)
    maps = [swept for pair in itertools.combinations(axes, 2) for swept in _parted(study.runs, pair) if _is_grid(swept)]
    curves = [swept for axis in axes for swept in _parted(study.runs, (axis,))
              if len(swept.runs) > 1 and not any(_covers(grid, swept) for grid in maps)]
    named_ones = [*_named(maps, "heatmap"), *_named(curves, "sweep")]
    if not named_ones:
        return None
    drawings = [Drawing(f"fig_{name}", f"{swept.title}: accuracy over {' and '.join(swept.over)}.",
                        partial(_map if len(swept.axes) == 2 else _curve, swept))
                for name, swept in named_ones[:_MOST_DRAWN]]
    text = paragraphs(_TEXT)
    if len(named_ones) > len(drawings):
        text.append(f"{len(named_ones) - len(drawings)} more have a table but no figure.")
    return Section("swept", "Swept settings", text, [_table(swept, name) for name, swept in named_ones], drawings)


def _axes(runs: Sequence[Run]) -> list[str]:
    """Identity fields with several numeric values: fields of the sampler come first, then fields of the blend."""
    values: dict[str, set] = {}
    for run in runs:
        for key, value in run.identity.items():
            if key not in _NO_AXES and isinstance(value, (int, float)) and not isinstance(value, bool):
                values.setdefault(key, set()).add(value)
    varying = [key for key, found in values.items() if len(found) > 1]
    return sorted(varying, key=lambda key: (not key.startswith("sampler."), not key.startswith("blend.")))


def _parted(runs: Sequence[Run], axes: tuple[str, ...]) -> list[_Swept]:
    """The runs that have these axes, in groups. The runs of a group differ only in the axes and in the seed."""
    parts: dict[str, dict[tuple[float, ...], list[Run]]] = {}
    for run in runs:
        values = tuple(run.identity[axis] for axis in axes if isinstance(run.identity.get(axis), (int, float)))
        if len(values) == len(axes):
            rest = {key: value for key, value in followed(run.identity).items() if key not in (*axes, "seed")}
            parts.setdefault(json.dumps(rest, sort_keys=True), {}).setdefault(values, []).append(run)
    return [_Swept(axes, dict(sorted(part.items()))) for part in parts.values()]


def _is_grid(swept: _Swept) -> bool:
    """Whether both axes have at least two values and the runs are not only a diagonal."""
    sizes = [len({values[axis] for values in swept.runs}) for axis in (0, 1)]
    return min(sizes) > 1 and len(swept.runs) > max(sizes)


def _covers(grid: _Swept, curve: _Swept) -> bool:
    """Whether the curve is a row or a column of the grid."""
    drawn = {id(run) for runs in grid.runs.values() for run in runs}
    return all(id(run) in drawn for runs in curve.runs.values() for run in runs)


def _named(found: Sequence[_Swept], prefix: str) -> list[tuple[str, _Swept]]:
    """Names such as `heatmap_alpha_beta`. A name that is already taken gets a number."""
    names = ["_".join([prefix, *swept.over]) for swept in found]
    numbers = [names[:place].count(name) for place, name in enumerate(names)]
    return [(f"{name}_{number + 1}" if number else name, swept)
            for name, number, swept in zip(names, numbers, found, strict=True)]


def _table(swept: _Swept, name: str) -> ReportTable:
    rows = []
    for values, runs in swept.runs.items():
        records = swept.records(values)
        proposals = sum(record["proposals"] for record in records)
        rows.append({**dict(zip(swept.over, values, strict=True)), **accurate(swept.at(values)), "runs": len(runs),
                     "state": "complete" if all(run.complete for run in runs) else "interrupted",
                     "acceptance": sum(record["accepted"] for record in records) / proposals if proposals else None,
                     "token_forwards": sum(record["token_forwards"] for record in records) / len(records)})
    columns = [*(named(axis, axis) for axis in swept.over), shared("accuracy", "accuracy"), counted("samples", "n"),
               counted("runs", "runs"), shared("MH accept", "acceptance"),
               numbered("token-forwards per sample", "token_forwards", ",.0f"), named("state", "state")]
    return ReportTable(name, f"{swept.title}, over {' and '.join(swept.over)}", columns, rows)


def _map(swept: _Swept) -> Figure:
    from matplotlib.figure import Figure

    down, across = (sorted({values[axis] for values in swept.runs}) for axis in (0, 1))
    cells = np.full((len(down), len(across)), np.nan)
    estimates = {values: swept.at(values) for values in swept.runs}
    for values, estimate in estimates.items():
        cells[down.index(values[0]), across.index(values[1])] = 100.0 * estimate.known
    middle, half = (np.nanmin(cells) + np.nanmax(cells)) / 2, max(_NARROWEST, np.nanmax(cells) - np.nanmin(cells)) / 2
    drawn = Figure(figsize=(2.6 + 1.15 * len(across), 1.7 + 0.62 * len(down)), layout="constrained")
    axes = drawn.subplots()
    # Cividis can be read by colour-blind readers, and in greyscale from dark to light.
    image = axes.pcolormesh(np.ma.masked_invalid(cells), cmap="cividis", vmin=middle - half, vmax=middle + half,
                            edgecolors="white", linewidth=1.5)
    for values, estimate in estimates.items():
        row, column = down.index(values[0]), across.index(values[1])
        value, interval = 100.0 * estimate.known, [f"{100.0 * end:.0f}" for end in estimate.interval or ()]
        axes.text(column + 0.5, row + 0.5, f"{value:.1f}\n[{', '.join(interval)}]\nn {estimate.n:,}", ha="center", va="center",
                  fontsize=7.5, color="#010101" if value > middle + 0.1 * half else "#fefefe")  # not the page's colours
    axes.set_yticks(np.arange(len(down)) + 0.5, [f"{value:g}" for value in down])
    axes.set_xticks(np.arange(len(across)) + 0.5, [f"{value:g}" for value in across])
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.set_ylabel(swept.over[0])
    axes.set_xlabel(swept.over[1])
    axes.set_title(swept.title)
    drawn.colorbar(image, ax=axes, label="correct answers, %")
    return drawn


def _curve(swept: _Swept) -> Figure:
    from matplotlib.figure import Figure

    from dflash_mcmc.report.figure import RIGHT, error_bars

    drawn = Figure(figsize=(4.8, 3.2), layout="constrained")
    axes = drawn.subplots()
    places, estimates = [values[0] for values in swept.runs], [swept.at(values) for values in swept.runs]
    axes.errorbar(places, [100.0 * estimate.known for estimate in estimates], error_bars(estimates), color=RIGHT, marker="o",
                  capsize=3)
    axes.set_xticks(places, [f"{value:g}" for value in places])
    axes.set_xlabel(f"{swept.over[0]}; n = {min(estimate.n for estimate in estimates):,} samples or more each")
    axes.set_ylabel("correct answers, %")
    axes.set_title(swept.title)
    return drawn
