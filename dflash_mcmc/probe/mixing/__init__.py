"""Measures how Metropolis-Hastings chains on p^alpha mix. Papers that sample with such chains do not report this.

The probe measures moved rate, acceptance by cut and by length, R-hat and effective sample size over parallel chains,
autocorrelation, log ratios and the savings of early rejection, over a grid of powers and temperatures. The chains are the
same as in a run without a probe, with the same keys and the same engine.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity, spec_of
from dflash_mcmc.probe import ProblemProbe, Summary, Unit, Work
from dflash_mcmc.probe.columns import Table
from dflash_mcmc.probe.mixing.chains import MixingRecord
from dflash_mcmc.registry import components, name_of, register
from dflash_mcmc.runner import build, cost
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
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
    measures_chains = True

    def check(self, config: Config) -> None:
        """Checks that the sampler makes Metropolis-Hastings steps and allows the setting of every cell. Raises ConfigError."""
        able = [name for name, found in components("sampler").items() if _makes_chains(found.cls)]
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

    @classmethod
    def columns(cls) -> tuple[Table, ...]:
        """See `Probe.columns`."""
        from dflash_mcmc.probe.mixing import tables

        return tables.ALL

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
        axes = {field: getattr(self, name) or [getattr(sampler, field)]
                for name, field in self._axes(config).items()}
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
        known = [value for value in forwards if value is not None]
        return UnitCost(sum(known), sum(map(cost.draft_blocks, cells))) if len(known) == len(cells) else None

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
                for number, setting in enumerate(settings):
                    yield (unit, number), build.chain(config, setting.sampler, unit.problem, unit.chain, prompts[unit.problem])

        with closing(engine):
            for done in engine.run(drawn()):
                unit, number = cast("tuple[Unit, int]", done.tag)
                cells = begun[unit]
                cells[number] = chains.cell_record(settings[number].effective(), done.result, done.cost, done.failure)
                if len(cells) == len(settings):
                    totals = {name: sum(cell.get(name, 0) for cell in cells.values())
                              for name in ("proposals", "accepted", "moved")}
                    yield unit, {"cells": [cells[place] for place in range(len(settings))], **totals}
                    del begun[unit]

    def summarise(self, config: Config, records: list[dict]) -> Summary:
        """Tables of moves, cost, convergence and log ratios by cell. The values are for the last half of each cell's steps."""
        from dflash_mcmc.probe.mixing import chains, tables

        return tables.summary(chains.cells_of(records))

    def figures(self, config: Config, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """Rates by cut and length, traces, autocorrelation and log ratios. If there are several cells, also the grid."""
        from dflash_mcmc.probe.mixing import chains, figures
        from dflash_mcmc.probe.mixing.tables import SHOWN

        cells = chains.cells_of(records)
        drawn = {"fig_mixing_acceptance": figures.acceptance(summary.tables),
                 "fig_mixing_traces": figures.traces(cells),
                 "fig_mixing_autocorrelation": figures.autocorrelation(summary.data, SHOWN),
                 "fig_mixing_log_ratio": figures.log_ratio(summary.data)}
        if len(cells) > 1:
            named = [("1/alpha" if setting.temperature is None else f"{setting.temperature:g}", setting.effective())
                     for setting in self.settings(config)]
            drawn["fig_mixing_grid"] = figures.grid(summary.tables, named, SHOWN)
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
    spec = next(spec_of(found) for found in dataclasses.fields(sampler) if found.name == field)
    kind = typing.get_type_hints(type(sampler))[field]
    optional = type(None) in typing.get_args(kind)
    right = values is None or (values and len(set(values)) == len(values) and all(
        optional if value is None else spec.admits(value) for value in values))
    if not right:
        raise ConfigError(f"probe.{name}", values, f"null, or a list, none twice, of values that sampler.{field} may have: "
                          f"{spec.describe(kind)}")
