"""Measures how Metropolis-Hastings chains on p^alpha mix. Papers that sample with such chains do not report this.

The probe measures moved rate, acceptance by cut and by length, R-hat and effective sample size over parallel chains,
autocorrelation, log ratios and the savings of early rejection, over a grid of powers and temperatures. The chains are the
same as in a run without a probe, with the same keys and the same engine. Figures with a panel per cell show only the first
cells of the grid and state this.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity, spec_of
from dflash_mcmc.probe import ProblemProbe, Summary, Unit, Work
from dflash_mcmc.probe.mixing.chains import Cell, MixingRecord, StepChain
from dflash_mcmc.registry import components, name_of, register
from dflash_mcmc.report.figure import INK, MARKERS, OTHER, PALETTE, RIGHT, WRONG, bars_of, end_of
from dflash_mcmc.runner import build, cost
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.ops import Chain


_TEMPERATURES = ("draft_temperature", "proposal_temperature")
"""Possible names of the sampler's field for the temperature of its proposal. The first one that the sampler has is used."""


@dataclass(slots=True, kw_only=True)
class ChainSampler(Sampler):
    """The fields that this probe needs of a sampler, besides a temperature. A sampler need not inherit from this class."""
    alpha: float
    num_steps: int
    early_reject: str


class Setting(NamedTuple):
    """A cell of the grid, with its sampler."""
    alpha: float
    temperature: float | None
    """The temperature as configured; None for the sampler's default, 1/alpha."""
    sampler: ChainSampler

    def effective(self) -> tuple[float, float, str]:
        """The cell's values in a record: alpha, effective temperature, and effective early rejection."""
        return self.alpha, self.sampler.law().temperature, self.sampler.early_reject


@register("probe", "mixing")
@dataclass(slots=True, kw_only=True)
class Mixing(ProblemProbe):
    """Mixing of Metropolis-Hastings chains: which steps move, and whether parallel chains agree, over a grid of settings.

    Each chain of each problem is drawn in every cell of the grid alphas x temperatures x early_rejects. All cells use the
    same uniforms (common random numbers), which reduces the noise of differences between cells. R-hat needs num_chains >= 2;
    otherwise its column is None. Statistics are computed in three windows: all steps, the last half, and the steps of the
    last stage. An effective sample size needs 20 steps in its window. Problems with fewer steps are left out
    and counted.
    """
    alphas: list[float] | None = identity(None, "powers of the target, one row of the grid each; null uses the sampler's")
    temperatures: list[float | None] | None = identity(None, "temperatures of the proposal, one column of the grid each: "
                                                       "proposal_temperature of power_mh and draft_refine, draft_temperature "
                                                       "of draft_mh; null uses the sampler's")
    early_rejects: list[str] | None = identity(None, "values of the sampler's early_reject, each in every cell; if off is "
                                               "among them, the saving of early rejection is measured; null uses the "
                                               "sampler's")

    uses = ("model", "draft", "blend", "sampler", "decoder", "dataset")
    runs_chains_alone = True
    draws_with_stops = True
    unit = "chain"
    record_type = MixingRecord
    tables_in = f"{__name__}.tables"
    measures_chains = True

    def check(self, config: Config) -> None:
        """Checks that the sampler makes Metropolis-Hastings steps and allows the setting of every cell. Raises ConfigError."""
        able = [name for name, option in components("sampler").items() if _makes_chains(option.cls)]
        if not _makes_chains(type(config.sampler)):
            raise ConfigError("sampler", name_of(config.sampler), f"{', '.join(able)} with probe=mixing")
        sampler = _chain_sampler(config)
        if not sampler.num_steps:
            raise ConfigError("sampler.num_steps", 0, "a whole number >= 1 with probe=mixing")
        for name, field in self._axes(config).items():
            _check_axis(name, getattr(self, name), sampler, field)
        for setting in self.settings(config):
            tried = dataclasses.replace(config, sampler=setting.sampler)
            for group in ("blend", "sampler", "decoder"):
                getattr(tried, group).check(tried)

    def resolved(self, config: Config) -> Mixing:
        """The probe with `early_rejects` set. The default is the configured value of the sampler, e.g. `auto`.

        `auto` is not replaced here, because each cell chooses a value for its own alpha.
        """
        return self if self.early_rejects else dataclasses.replace(self, early_rejects=[_chain_sampler(config).early_reject])

    def canonical(self, config: Config) -> dict[str, object]:
        """The effective early rejection of each cell. It is part of the identity, because it changes the cost of chains."""
        effective = [setting.sampler.early_reject for setting in self.measured(config)]
        return {"early_rejects": effective if len(set(effective)) > 1 else effective[:1]}

    def settings(self, config: Config) -> list[Setting]:
        """All cells of the grid; some may have equal effective values."""
        sampler = _chain_sampler(config)
        axes = {field: getattr(self, name) or [getattr(sampler, field)] for name, field in self._axes(config).items()}
        settings = []
        for values in itertools.product(*axes.values()):
            chosen = dataclasses.replace(sampler, **dict(zip(axes, values, strict=True)))
            settings.append(Setting(values[0], values[1], chosen.resolved(config)))
        return settings

    def measured(self, config: Config) -> list[Setting]:
        """The cells that differ in their effective values, as in the records."""
        distinct: dict[tuple, Setting] = {}
        for setting in self.settings(config):
            distinct.setdefault(setting.effective(), setting)
        return list(distinct.values())

    def expected_cost(self, config: Config) -> UnitCost | None:
        """The cost of one chain in every cell of the grid."""
        cells = [dataclasses.replace(config, sampler=setting.sampler) for setting in self.measured(config)]
        forwards = [cost.token_forwards(cell) for cell in cells]
        counted = [value for value in forwards if value is not None]
        return UnitCost(sum(counted), sum(map(cost.draft_blocks, cells))) if len(counted) == len(cells) else None

    def measure(self, config: Config, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Draws the chain of a unit in every cell. The record has their traces and costs, and totals for the tracker.

        All cells of all units share one engine.
        """
        from dflash_mcmc.probe.mixing import chains

        model = config.engine.load(config, work.device)
        problems = {problem.id: problem for problem in config.dataset.problems()}
        prompts = build.prompts(config, model, [problems[unit.problem] for unit in work.units])
        settings = self.measured(config)
        begun: dict[Unit, dict[int, dict]] = {}
        engine = config.engine.start(config, model, max(map(len, prompts.values())), len(work.units) * len(settings))

        def drawn() -> Iterator[tuple[tuple[Unit, int], Chain]]:
            for unit in work:
                begun[unit] = {}
                for index, setting in enumerate(settings):
                    yield (unit, index), build.chain(config, setting.sampler, unit.problem, unit.chain, prompts[unit.problem],
                                                     model)

        with closing(engine):
            for done in engine.run(drawn()):
                unit, index = cast("tuple[Unit, int]", done.tag)
                cells = begun[unit]
                cells[index] = chains.cell_record(settings[index].effective(), done.result, done.cost, done.failure)
                if len(cells) == len(settings):
                    totals = {name: sum(cell.get(name, 0) for cell in cells.values())
                              for name in ("proposals", "accepted", "moved")}
                    yield unit, {"cells": [cells[index] for index in range(len(settings))], **totals}
                    del begun[unit]

    def summarise(self, config: Config, records: list[dict]) -> Summary:
        """Tables of moves, cost, convergence and log ratios by cell. The values are for the last half of each cell's steps."""
        from dflash_mcmc.probe.mixing import chains, tables

        return tables.summary(chains.cells_of(records))

    def figures(self, config: Config, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """Rates by cut and length, traces, autocorrelation and log ratios. If there are several cells, also the grid."""
        from dflash_mcmc.probe.mixing import chains
        from dflash_mcmc.probe.mixing.tables import SHOWN

        cells = chains.cells_of(records)
        drawn = {"fig_mixing_acceptance": acceptance(summary.tables),
                 "fig_mixing_traces": traces(cells),
                 "fig_mixing_autocorrelation": autocorrelation(summary.data, SHOWN),
                 "fig_mixing_log_ratio": log_ratio(summary.data)}
        if len(cells) > 1:
            named = [("1/alpha" if setting.temperature is None else f"{setting.temperature:g}", setting.effective())
                     for setting in self.settings(config)]
            drawn["fig_mixing_grid"] = grid(summary.tables, named, SHOWN)
        return drawn

    def _axes(self, config: Config) -> dict[str, str]:
        """The sampler's field for each axis of the grid."""
        return {"alphas": "alpha", "temperatures": _temperature(type(config.sampler)), "early_rejects": "early_reject"}


def _makes_chains(sampler: type) -> bool:
    """Whether a sampler makes Metropolis-Hastings steps on p^alpha."""
    names = {field.name for field in dataclasses.fields(sampler)}
    return {field.name for field in dataclasses.fields(ChainSampler)} <= names and not names.isdisjoint(_TEMPERATURES)


def _chain_sampler(config: Config) -> ChainSampler:
    """The configured sampler. `Mixing.check` has checked that it has the fields of `ChainSampler`."""
    return cast("ChainSampler", config.sampler)


def _temperature(sampler: type) -> str:
    names = {field.name for field in dataclasses.fields(sampler)}
    return next(name for name in _TEMPERATURES if name in names)


def _check_axis(name: str, values: list | None, sampler: ChainSampler, field: str) -> None:
    """Checks that the sampler's field allows all values, and that no value repeats. Raises ConfigError."""
    spec = next(spec_of(each) for each in dataclasses.fields(sampler) if each.name == field)
    kind = typing.get_type_hints(type(sampler))[field]
    optional = type(None) in typing.get_args(kind)
    right = values is None or (values and len(set(values)) == len(values) and all(
        optional if value is None else spec.admits(value) for value in values))
    if not right:
        raise ConfigError(f"probe.{name}", values, f"null, or a list, none twice, of values that sampler.{field} may have: "
                          f"{spec.describe(kind)}")


_MOST_CELLS = _MOST_CHAINS = 6
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
_PROPOSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "identical": ("equal to the state", {"facecolor": OTHER}),
    "different": ("complete, different", {"facecolor": RIGHT}),
    "abandoned": ("abandoned, at its upper bound",
                  {"facecolor": "white", "edgecolor": WRONG, "hatch": "/////", "linewidth": 0.8}),
}
"""Columns of the histogram: label and style."""


def acceptance(tables: dict[str, list[dict]]) -> Figure:
    """Acceptance and moved rate by relative cut and by suffix length, with intervals. Each cell has a row of panels."""
    settings = _settings(tables["cells"])
    shown = settings[:_MOST_CELLS]
    figure = _figure(9.0, 1.0 + 2.6 * len(shown))
    panels = figure.subplots(len(shown), 2, squeeze=False, sharey=True)
    for row, setting in enumerate(shown):
        for axes, table, name in zip(panels[row], ("by_cut", "by_length"), ("cut", "suffix"), strict=True):
            rows = [each for each in tables[table] if _setting(each) == setting]
            _rates(axes, rows, name)
            axes.set_title(_label(setting) if name == "cut" else "")
            axes.set_xlabel({"cut": "cut / length of the sequence", "suffix": "redrawn tokens"}[name]
                            + " (n: proposals)" if row == len(shown) - 1 else "")
    panels[0, 0].set_ylim(0.0, 1.02)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    _note(figure, settings)
    return figure


def _rates(axes: Axes, rows: list[dict], name: str) -> None:
    xs = np.arange(len(rows))
    for key, shift, colour, marker, label in (("acceptance", -0.12, OTHER, "s", "accepted"),
                                              ("moved_rate", 0.12, RIGHT, "o", "moved (accepted and changed)")):
        kept = [x for x in xs if rows[x][key] is not None]
        _whiskers(axes, [x + shift for x in kept], [rows[x] for x in kept], key, colour, marker, label)
    axes.set_xticks(xs, [f"{row[name]}\nn={row['proposals']:,}" for row in rows], fontsize=7.5)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylabel("share of proposals" if name == "cut" else "")


def _whiskers(axes: Axes, xs: Sequence[float], rows: list[dict], key: str, colour: str, marker: str, label: str) -> None:
    axes.errorbar(xs, [row[key] for row in rows], bars_of(rows, key), color=colour, marker=marker, linestyle="none", capsize=3,
                  markersize=5, label=label)


def traces(cells: Sequence[Cell]) -> Figure:
    """Log p over the steps of parallel chains, for the problems with the fewest, the median and the most moves.

    The problems are chosen separately for each cell. Lines have gaps where the state grew between two stages.
    """
    shown = [cell for cell in cells if cell.chains][:_MOST_CELLS]
    figure = _figure(10.0, 0.8 + 2.6 * max(1, len(shown)))
    panels = figure.subplots(max(1, len(shown)), 3, squeeze=False)
    for row, cell in enumerate(shown):
        ordered = sorted(cell.problems.values(), key=lambda chains: sum(int(chain.moved.sum()) for chain in chains))
        chosen = [("fewest moves", ordered[0]), ("median", ordered[(len(ordered) - 1) // 2]), ("most moves", ordered[-1])]
        for axes, (what, chains) in zip(panels[row], chosen, strict=True):
            _trace(axes, chains, what)
        panels[row, 0].set_ylabel(f"{_label(_of(cell))}\nlog p of the state, nats", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("step (gap: the state grew)")
    _note(figure, [_of(cell) for cell in cells if cell.chains])
    return figure


def _trace(axes: Axes, chains: list[StepChain], what: str) -> None:
    moves, steps = sum(int(chain.moved.sum()) for chain in chains), sum(chain.num_steps for chain in chains)
    for index, chain in enumerate(chains[: _MOST_CHAINS]):
        steps_along, log_p = np.arange(1, chain.num_steps + 1, dtype=float), chain.log_p
        after = np.where(chain.moved, chain.proposal_length, chain.length)
        grown = 1 + np.flatnonzero(chain.length[1:] != after[:-1])
        axes.plot(np.insert(steps_along, grown, np.nan), np.insert(log_p, grown, np.nan), color=PALETTE[index],
                  linestyle=_DASHES[index], linewidth=1.2, drawstyle="steps-post")
        axes.plot(steps_along[chain.moved], log_p[chain.moved], color=PALETTE[index], linestyle="none",
                  marker=MARKERS[index], markersize=3.5)
    axes.set_title(f"{what}: {chains[0].problem}\n{moves} of {steps} steps of {len(chains)} chains move", fontsize=8.5)
    axes.margins(y=0.1)


def autocorrelation(data: dict[str, list[dict]], window: str) -> Figure:
    """Mean autocorrelation of log p by lag, without stuck chains. Each cell has a line."""
    rows = [row for row in data["autocorrelation_by_lag"] if row["window"] == window]
    settings = _settings(rows)
    figure = _figure(7.0, 4.0 + 0.2 * min(len(settings), _MOST_CELLS))
    axes = figure.subplots()
    axes.axhline(0.0, color=INK, linewidth=0.6)
    for index, setting in enumerate(settings[:_MOST_CELLS]):
        mine = [row for row in rows if _setting(row) == setting]
        lags, values = [row["lag"] for row in mine], [row["autocorrelation"] for row in mine]
        label = f"{_label(setting)}: {mine[0]['chains']} moving chains, {mine[0]['stuck']} stuck"
        axes.plot(lags, values, color=PALETTE[index], linestyle=_DASHES[index], marker=MARKERS[index], markersize=4,
                  label=label)
        axes.plot(lags, [row["independent"] for row in mine], color=INK, linestyle=":", linewidth=0.8)
        low, high = ([end_of(row, "autocorrelation", end) for row in mine] for end in ("low", "high"))
        axes.fill_between(lags, low, high, color=PALETTE[index], alpha=0.15, linewidth=0.0)
    axes.set(title="Autocorrelation of log p, second half of the steps (dotted: independent draws)", xlabel="lag, steps",
             ylabel="mean over moving chains")
    axes.locator_params(axis="x", integer=True)
    if settings:
        figure.legend(loc="outside lower left")
    else:
        axes.text(0.5, 0.5, "no chain moves", ha="center", transform=axes.transAxes)
    _note(figure, settings)
    return figure


def log_ratio(data: dict[str, list[dict]]) -> Figure:
    """Histogram of log ratios, in bins that widen away from 0. The numbers are counts."""
    from matplotlib.patches import Patch

    rows = data["log_ratio_counts"]
    settings = _settings(rows)
    shown = settings[:_MOST_CELLS]
    figure = _figure(8.0, 0.9 + 2.3 * max(1, len(shown)))
    panels = figure.subplots(max(1, len(shown)), 1, squeeze=False, sharex=True)[:, 0]
    for axes, setting in zip(panels, shown, strict=False):
        _histogram(axes, [row for row in rows if _setting(row) == setting])
        axes.set_title(_label(setting))
    panels[-1].set_xlabel("log of the Metropolis-Hastings ratio, nats (at 0 and above, a proposal is always accepted)")
    figure.legend(handles=[Patch(label=label, **look) for label, look in _PROPOSALS.values()], loc="outside upper right",
                  ncols=3)
    _note(figure, settings)
    return figure


def _histogram(axes: Axes, rows: list[dict]) -> None:
    total = sum(row[name] for row in rows for name in _PROPOSALS)
    xs, under = np.arange(len(rows)), np.zeros(len(rows))
    for name, (_, look) in _PROPOSALS.items():
        counts = np.array([row[name] for row in rows])
        there = counts > 0  # an empty bar would show its outline as a line
        axes.bar(xs[there], counts[there] / total, 0.9, bottom=under[there], **look)
        under += counts / max(1, total)
    for x, row in enumerate(rows):
        count = sum(row[name] for name in _PROPOSALS)
        if count:
            axes.text(x, under[x], f"{count:,}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks(xs[:-1] + 0.5, [f"{row['high']:g}" for row in rows[:-1]], fontsize=7.5)
    axes.set(ylabel=f"share of n={total:,} proposals", xlim=(-0.6, len(rows) - 0.4), ylim=(0.0, 1.12 * max(under.max(), 1e-9)))
    axes.grid(visible=False, axis="x")


def grid(tables: dict[str, list[dict]], named: Sequence[tuple[str, tuple[float, float, str]]], window: str) -> Figure:
    """Heat maps over alpha and temperature: moved rate, problems with R-hat above 1.1, and ESS per 1,000 token-forwards.

    Args:
        named: for each place in the grid, the temperature as configured and the effective setting.
    """
    alphas = list(dict.fromkeys(setting[0] for _, setting in named))
    names = list(dict.fromkeys((temperature, setting[2]) for temperature, setting in named))
    one = len({early for _, early in names}) == 1
    panels = (("cells", "moved_rate", "Moved rate", "proposals"),
              ("convergence", "rhat_above_1.1", "Problems with R-hat > 1.1", "rhat_problems"),
              ("effective_samples", "ess_per_1000_token_forwards", "ESS per 1,000 token-forwards", "problems"))
    figure = _figure(3.6 + 3.0 * max(1.8, 0.9 * len(names)), 1.8 + 0.75 * len(alphas))
    for axes, (table, key, title, count) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        rows = {_setting(row): row for row in tables[table] if row.get("window", window) == window}
        values, texts = np.full((len(alphas), len(names)), np.nan), {}
        for temperature, setting in named:
            cell, row = (alphas.index(setting[0]), names.index((temperature, setting[2]))), rows[setting]
            values[cell] = np.nan if row[key] is None else row[key]
            texts[cell] = _cell_text(row, key, row[count])
        _heat(axes, values, texts, top=None if key.startswith("ess") else 1.0)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(len(names)), [name if one else f"{name}\n{early}" for name, early in names])
        axes.set_yticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
        axes.set(xlabel="proposal temperature", ylabel="alpha" if table == "cells" else "")
    figure.suptitle(f"R-hat and ESS: window {window}; n: proposals in the left panel, problems in the others", fontsize=8,
                    x=0.01, ha="left")
    return figure


def _cell_text(row: dict, key: str, count: int) -> str:
    if row[key] is None:
        return f"-\nn={count:,}"
    interval = "" if row[f"{key}_low"] is None else f"[{row[f'{key}_low']:.2g}, {row[f'{key}_high']:.2g}]\n"
    return f"{row[key]:.3g}\n{interval}n={count:,}"


def _heat(axes: Axes, values: np.ndarray, texts: dict[tuple[int, int], str], top: float | None) -> None:
    top = top or max(np.nanmax(values, initial=0.0), 1e-9)
    axes.imshow(values, cmap="cividis", vmin=0.0, vmax=top, aspect="auto")
    axes.grid(visible=False)
    for cell, text in texts.items():
        light = np.isnan(values[cell]) or values[cell] > 0.5 * top
        axes.text(cell[1], cell[0], text, ha="center", va="center", fontsize=7.5, color=INK if light else "white")


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _setting(row: dict) -> tuple[float, float, str]:
    return row["alpha"], row["temperature"], row["early_reject"]


def _settings(rows: Sequence[dict]) -> list[tuple[float, float, str]]:
    return list(dict.fromkeys(map(_setting, rows)))


def _of(cell: Cell) -> tuple[float, float, str]:
    return cell.alpha, cell.temperature, cell.early_reject


def _label(setting: tuple[float, float, str]) -> str:
    alpha, temperature, early_reject = setting
    return f"alpha {alpha:g}, temperature {temperature:g}, early reject {early_reject}"


def _note(figure: Figure, settings: Sequence[object]) -> None:
    if len(settings) > _MOST_CELLS:
        figure.suptitle(f"first {_MOST_CELLS} of {len(settings)} cells", fontsize=8, x=0.01, ha="left")
