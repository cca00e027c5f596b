"""A probe measures units and records each, in place of drawing samples: it says why a method works.

It is a component of the group `probe`: it says what its units are, measures those that are pending, and makes numbers, tables
and figures of the records (see `dflash_mcmc.probe.Probe`). Run folder, resuming, the processes of a launch, progress and
tracker are not its business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from dflash_mcmc.config.identity import hash_of, identity_of, run_folder
from dflash_mcmc.config.schema import Config
from dflash_mcmc.process import ranks, stopping
from dflash_mcmc.registry import name_of
from dflash_mcmc.report.probed import csv_of
from dflash_mcmc.run.samples import RunResult, describe
from dflash_mcmc.run.tracking import Tracking
from dflash_mcmc.store.files import write_atomically
from dflash_mcmc.store.folder import RunStore

_POLL_SECONDS = 0.5


class Unit(NamedTuple):
    """What is measured at once and recorded as one line: as a sample is, something of a problem, and which of them."""

    problem: str
    chain: int = 0


class Work:
    """The pending units. Iterating takes the next one that no other process has taken: ask when there is room for it.

    Attributes:
        units: all that are pending, whoever takes them.
        device: name for PyTorch.
        taken: number of units that this process has taken.

    Args:
        take: of the units those that this process may measure, each when it is asked for.
    """

    def __init__(self, units: list[Unit], device: str, take: Callable[[Iterable[Unit]], Iterable[Unit]] = iter):
        self.units, self.device, self.taken, self._take = units, device, 0, take

    def __iter__(self) -> Iterator[Unit]:
        for unit in self._take(self.units):
            if stopping.requested():
                return
            self.taken += 1
            yield unit


class Summary(NamedTuple):
    """What the records say. JSON values; None where there is no number."""

    values: dict[str, float | int | str | None]
    """For `summary.json` and the tracker."""
    tables: dict[str, list[dict]]
    """By name, rows with the same keys: printed, in `summary.json`, and a CSV file each."""
    data: dict[str, list[dict]]
    """The same for CSV files alone: what figures are drawn from."""


def execute(config: Config) -> RunResult:
    """Measures what the run lacks and summarises it. A run that lacks nothing loads no model. Raises UserError and Stopped.

    Any number of processes measure together, each what no other has claimed; one at a time tells the tracker.
    """
    identity, units = identity_of(config), config.probe.units(config)
    digest = hash_of(identity)
    with stopping.heeded(config.hardware.grace_seconds):
        with (RunStore.open(run_folder(config, digest)) as store,
              Tracking(store, config, digest, _numbers) as tracking):
            recorded = store.recorded()
            pending = [unit for unit in units if unit not in recorded]
            if pending:
                _Measuring(store, config, identity, pending, tracking).run()
            store.look_again()  # behind its own last record: of all processes the last to look sees the run complete
            left, summary = set(units) - store.recorded(), {}
            num_new = len(set(pending) - left)
            if not left and not ranks.rank():
                summary = _write(store, config, units, tracking)
            result = RunResult(store.folder, summary, num_new, 0 if left else len(store.records) - len(units), len(left))
        stopping.check()
    return result


class _Measuring:
    """Records the pending units that no other process measures. What is under way when it is stopped is given up."""

    def __init__(self, store: RunStore, config: Config, identity: dict[str, object], pending: list[Unit],
                 tracking: Tracking):
        self._store, self._config, self._identity, self._pending, self._tracking = store, config, identity, pending, tracking
        self._device, self._before, self._described = config.hardware.resolve(), len(store.records), False

    def run(self) -> None:
        """Comes back when nothing is left that this process can measure. Raises UserError and Stopped."""
        from tqdm import tqdm

        with tqdm(total=len(self._pending), unit=self._config.probe.unit, desc=self._config.label(), smoothing=0.1,
                  mininterval=0.5, dynamic_ncols=True, disable=bool(ranks.rank())) as self._bar:
            self._measure(Work(ranks.own_part_first(self._pending), self._device, self._store.take))
            while ranks.waits() and not stopping.requested() and (left := self._left()):
                unit = next(self._store.take(left), None)
                if unit is None:
                    time.sleep(_POLL_SECONDS)
                    self._store.refresh()
                    self._show()
                else:  # the process that had it is gone
                    self._measure(Work([unit], self._device))
        if self._left():
            stopping.check()

    def _measure(self, work: Work) -> None:
        number, measured = 0, iter(self._config.probe.measure(self._config, work))
        done = next(measured, None)  # what it refuses, it refuses before anything is written
        if not self._described and (not ranks.rank() or not self._store.is_described()):
            self._described = True
            describe(self._store, self._config, self._identity, work.device)
            self._tracking.start()
        while done is not None:
            unit, record = done
            self._store.append({**unit._asdict(), **record})
            number += 1
            self._show()
            done = next(measured, None)
        self._store.sync()
        if number != work.taken:
            raise RuntimeError(f"probe={name_of(self._config.probe)} has taken {work.taken} units and recorded {number}")

    def _show(self) -> None:
        self._tracking.catch_up()
        self._bar.update(len(self._store.records) - self._before - self._bar.n)

    def _left(self) -> list[Unit]:
        recorded = self._store.recorded()
        return [unit for unit in self._pending if unit not in recorded]


def _write(store: RunStore, config: Config, units: list[Unit], tracking: Tracking) -> dict:
    """Summary, tables and figures into the run folder, from its records alone, and to the tracker; returns `summary.json`."""
    from dflash_mcmc.report import figure

    with store.summarising():
        records = store.in_order(units)
        summary = config.probe.summarise(config, records)
        written = {"condition": config.label(), "probe": name_of(config.probe), "num_units": len(records), **summary.values,
                   "tables": summary.tables}
        store.write_summary(written)
        for name, rows in {**summary.tables, **summary.data}.items():
            write_atomically(store.folder / f"{name}.csv", csv_of(rows))
        with figure.style():
            figures = config.probe.figures(config, records, summary)
            for name, drawn in figures.items():
                figure.save(drawn, store.folder, name)
    tracking.complete(summary.values, summary.tables, [store.folder / f"{name}.png" for name in figures])
    return written


def _numbers(record: dict) -> dict[str, float]:
    """What a tracker shows of a record."""
    return _metrics({name: value for name, value in record.items() if name not in Unit._fields})


def _metrics(values: dict, prefix: str = "unit") -> dict[str, float]:
    """The numbers among the values, those of dictionaries too."""
    found = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found.update(_metrics(value, f"{prefix}/{name}"))
        elif isinstance(value, (int, float)):
            found[f"{prefix}/{name}"] = float(value)
    return found
