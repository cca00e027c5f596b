"""The units of a probe as the tasks of a run: measured, recorded, and summarised in tables and figures. `tasks_of` any run."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from dflash_mcmc.chains import cost
from dflash_mcmc.chains.cost import CostEstimate
from dflash_mcmc.components import name_of
from dflash_mcmc.config.schema import Config
from dflash_mcmc.grading.verdicts import TOO_LONG
from dflash_mcmc.probe import Probe
from dflash_mcmc.runner import fitting
from dflash_mcmc.runner.samples import Samples
from dflash_mcmc.runner.tasks import Results, Tasks, Worker
from dflash_mcmc.store.files import Schema, write_atomically
from dflash_mcmc.store.records import FAILURE, SampleKey, unit_schema
from dflash_mcmc.types import Summary, Unit, Work

_NO_PROBLEMS = ("(agent)", "(long) ")
"""What the names of units that are no problems begin with."""


class Units(Tasks[dict]):
    """The units of the configured probe."""

    def __init__(self, config: Config, prompts: Mapping[str, np.ndarray]):
        self._config, self._probe, self._prompts = config, config.probe, prompts
        self.unit = self._probe.unit

    def schema(self) -> Schema:
        return unit_schema()

    def keys(self) -> list[Unit]:
        return self._probe.units(self._config)

    def prepare(self, pending: Sequence[SampleKey], device: str) -> "UnitWorker":
        """Loads nothing: the probe loads what it needs when it measures."""
        return UnitWorker(self._config, device, self._prompts)

    def metrics(self, record: dict) -> dict[str, float]:
        return _numbers({name: value for name, value in record.items() if name not in Unit._fields})

    def summarise(self, records: Sequence[dict]) -> Results:
        """The probe summarises the units that were measured. Units without a measurement are only counted."""
        measured = [record for record in records if FAILURE not in record]
        of_probe = self._probe.summarise(self._config, measured) if measured else Summary({}, {}, {})
        failed, undrawn = len(records) - len(measured), {"skipped", FAILURE}
        counts: dict[str, object] = {}
        if "dataset" in self._probe.sources():  # the problems that the intervals are over: those not skipped, and drawn
            drawn = [record["problem"] for record in measured if not undrawn & record.keys() and not all(
                undrawn & cell.keys() for cell in record.get("cells") or [record])]
            counts["num_problems"] = len({problem for problem in drawn if not problem.startswith(_NO_PROBLEMS)})
        if failed:
            counts["num_units_failed"] = failed
        summary: dict[str, object] = {
            "condition": self._config.label(), "probe": name_of(self._probe), "num_units": len(records),
            **counts, **of_probe.values, "tables": of_probe.tables}
        return UnitResults(summary, {**of_probe.values}, of_probe.tables, self._config, measured, of_probe)

    @staticmethod
    def table(folders: Sequence[Path]) -> str:
        from dflash_mcmc.report.parts import of_probes

        return of_probes(folders)

    def estimate(self) -> CostEstimate:
        return cost.of_tasks(self._config, self._probe.num_units(self._config), self._probe.expected_cost(self._config))

    def assumptions(self) -> list[str]:
        name, expected = f"probe={name_of(self._probe)}: counted in {self.unit}s", self._probe.expected_cost(self._config)
        if expected is None:
            return [f"{name}; no estimate: the probe, or its sampler, does not give one"]
        if not expected.token_forwards:
            return [f"{name}; it evaluates no model"]
        if {"sampler", "decoder"} <= set(self._probe.sources()):
            return [name, *cost.assumptions(self._config)]
        return [name, cost.lengths(self._config), cost.rate(self._config)]

    def warning(self, records: Sequence[dict], folder: Path) -> str | None:
        failed = [record for record in records if FAILURE in record]
        if not failed:
            return None
        return (f"{len(failed)} of {len(records)} {self.unit}s could not be measured and are left out: "
                f"{failed[0]['problem']}: {failed[0][FAILURE]}")


class UnitWorker(Worker[dict]):
    """Lets the probe measure units."""

    def __init__(self, config: Config, device: str, prompts: Mapping[str, np.ndarray]):
        self._config, self._device, self._prompts = config, device, prompts

    def do(self, keys: Sequence[SampleKey], claimed: Iterable[SampleKey]) -> Generator[dict, None, None]:
        """Yields the record of each unit. Raises RuntimeError if the probe does not yield one for each unit that it took."""
        probe: Probe = self._config.probe
        taken, recorded, unfit = 0, 0, list[dict]()
        too_long = fitting.too_long_units(self._config, [problem for problem, _ in keys], self._prompts)

        def counted() -> Iterator[Unit]:
            nonlocal taken
            for key in claimed:
                if key[0] in too_long:
                    unfit.append({**Unit(*key)._asdict(), FAILURE: f"{TOO_LONG}: {too_long[key[0]].reason}"})
                    continue
                taken += 1
                yield Unit(*key)

        fits = [Unit(*key) for key in keys if key[0] not in too_long]
        measured = (probe.measure(self._config, Work(fits, self._device, counted())) if fits
                    else ((unit, {}) for unit in counted()))  # claims the units, and yields none of them
        for unit, record in measured:
            recorded += 1
            yield {**unit._asdict(), **record}
        yield from unfit
        if recorded != taken:
            raise RuntimeError(f"probe={name_of(probe)} has taken {taken} units and recorded {recorded}")


@dataclass(frozen=True, slots=True)
class UnitResults(Results):
    """The results of a probe, and the data of its figures."""

    config: Config
    records: list[dict]
    of_probe: Summary

    def write(self, folder: Path) -> list[Path]:
        """Writes a CSV file for each table, and each figure as PNG and SVG."""
        from dflash_mcmc.report import figure, parts

        for name, rows in {**self.of_probe.tables, **self.of_probe.data}.items():
            write_atomically(folder / f"{name}.csv", parts.csv_of(rows))
        if not self.records:
            return []
        with figure.style():
            figures = self.config.probe.figures(self.config, self.records, self.of_probe)
            for name, drawn in figures.items():
                figure.save(drawn, folder, name)
        return [folder / f"{name}.png" for name in figures]


def _numbers(values: dict, prefix: str = "unit") -> dict[str, float]:
    """The numbers among the values and in nested dictionaries, named by their path."""
    numbers = {}
    for name, value in values.items():
        if isinstance(value, dict):
            numbers.update(_numbers(value, f"{prefix}/{name}"))
        elif isinstance(value, (int, float)):
            numbers[f"{prefix}/{name}"] = float(value)
    return numbers


def tasks_of(config: Config, prompts: Mapping[str, np.ndarray] = MappingProxyType({})) -> Tasks:
    """The tasks of a configuration: the units of its probe, or samples if it has none.

    Args:
        prompts: token ids of prompts that are encoded already, by the ids of their problems.
    """
    return Samples(config, prompts) if config.probe.is_null else Units(config, prompts)
