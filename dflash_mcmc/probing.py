"""A probe measures units and records each, in place of drawing samples: it says why a method works.

It is a component of the group `probe`: it says what its units are, measures those that are pending, and makes numbers, tables
and figures of the records (see `Probe`). Run folder, resuming, the processes of a launch, progress and tracker are not its
business.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dflash_mcmc.config import Config, hash_of, identity_of, plain, run_folder
from dflash_mcmc.ranks import Team
from dflash_mcmc.registry import name_of
from dflash_mcmc.report.probed import csv_of
from dflash_mcmc.run import RunResult, describe
from dflash_mcmc.store import RunStore, write_atomically
from dflash_mcmc.tracker import Guarded, RunInfo

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from tqdm import tqdm


class Unit(NamedTuple):
    """What is measured at once and recorded as one line: as a sample is, something of a problem, and which of them."""

    problem: str
    chain: int = 0


class Work:
    """The pending units. Iterating takes the next one that no process of the launch has taken: ask when there is room for it.

    Attributes:
        units: all that are pending, whoever takes them.
        device: name for PyTorch.
        taken: number of units that this process has taken.
    """

    def __init__(self, units: list[Unit], device: str, team: Team):
        self.units, self.device, self.taken, self._team = units, device, 0, team

    def __iter__(self) -> Iterator[Unit]:
        for number in self._team.take(len(self.units)):
            self.taken += 1
            yield self.units[number]


class Summary(NamedTuple):
    """What the records say. JSON values; None where there is no number."""

    values: dict[str, float | int | str | None]
    """For `summary.json` and the tracker."""
    tables: dict[str, list[dict]]
    """By name, rows with the same keys: printed, in `summary.json`, and a CSV file each."""
    data: dict[str, list[dict]]
    """The same for CSV files alone: what figures are drawn from."""


class Probe(Protocol):
    """What a component of the group has, beside its fields. `needs_draft` and `check(config)` are as in the other groups."""

    uses: tuple[str, ...]
    """Groups that the records come from, `grader` too where it grades. Only these are checked, loaded and part of the
    identity; a value given on the command line for another is refused."""
    unit: str
    """What a unit is called."""

    def units(self, config: Config) -> list[Unit]:
        """All units that are asked for, in the order of the reports. Loads no model."""

    def measure(self, config: Config, work: Work) -> Iterator[tuple[Unit, dict]]:
        """The record of each unit that `work` gives, as it is done, in any order: JSON values, without problem and chain.

        A record but for its times is a function of identity and unit alone, whatever was measured before or beside it: its
        random numbers have keys of its own. What is refused with a UserError is refused before the first record.
        """

    def summarise(self, config: Config, records: list[dict]) -> Summary:
        """From records alone, which come in the order of `units`; at least one."""

    def figures(self, config: Config, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """By name: each becomes a PNG and an SVG. Made with matplotlib's Figure, not with pyplot, whose state is global."""


_runs = itertools.count()


def execute(config: Config) -> RunResult:
    """Measures what the run lacks and summarises it. A run that lacks nothing loads no model. Raises UserError.

    The processes of a launch share the pending units; the first of them tells, tracks and summarises.
    """
    identity, units = identity_of(config), config.probe.units(config)
    digest = hash_of(identity)
    folder = run_folder(config, digest)
    team = Team(f"probe-{next(_runs)}-{digest}")
    with RunStore.open(folder, team) as store:
        recorded = store.recorded()
        pending = [unit for unit in units if unit not in recorded]
        if pending:
            _measure(store, config, identity, units, pending, team)
        summary = {} if team.rank else _write(store, config, units)
    return RunResult(folder, summary, len(pending), len(store.records) - len(units))


def _measure(store: RunStore, config: Config, identity: dict[str, object], units: list[Unit], pending: list[Unit],
             team: Team) -> None:
    """Records the pending units. What is under way when it is stopped is given up, not recorded."""
    from tqdm import tqdm

    work, first, number = Work(pending, config.hardware.resolve(), team), not team.rank, 0
    with tqdm(total=len(pending), unit=config.probe.unit, desc=config.label(), smoothing=0.1, mininterval=0.5,
              dynamic_ncols=True, disable=not first) as bar:
        measured = iter(config.probe.measure(config, work))
        done, tracker, exit_code = next(measured, None), None, 1  # what it refuses, it refuses before anything is written
        if first:
            describe(store, config, identity, work.device)
            tracker = Guarded(config.tracker, RunInfo(hash_of(identity), config.name, config.label(), plain(config),
                                                      store.folder))
        try:
            while done is not None:
                unit, record = done
                store.append({**unit._asdict(), **record})
                bar.update(team.add("recorded", 1) - bar.n)
                number += 1
                if tracker:
                    tracker.log(_metrics(record), len(store.records))
                done = next(measured, None)
            if number != work.taken:
                raise RuntimeError(f"probe={name_of(config.probe)} has taken {work.taken} units and recorded {number}")
            if first:
                _gather(store, tracker, bar, team, len(pending))
                tracker.summary(config.probe.summarise(config, _in_order(store, units)).values, store.records)
            exit_code = 0
        finally:
            if tracker:
                tracker.finish(exit_code)


def _gather(store: RunStore, tracker: Guarded, bar: tqdm, team: Team, total: int) -> None:
    """Waits for the other processes and tracks what they have recorded."""
    while (count := team.add("recorded", 0)) < total:
        bar.update(count - bar.n)
        time.sleep(0.5)
    bar.update(total - bar.n)
    own = store.recorded()
    store.reread()
    others = [record for record in store.records if (record["problem"], record["chain"]) not in own]
    for number, record in enumerate(others, start=len(own) + 1):
        tracker.log(_metrics(record), number)


def _in_order(store: RunStore, units: list[Unit]) -> list[dict]:
    """Records in the order of the units, however they were come by; those that were not asked for now stand behind."""
    place = {unit: number for number, unit in enumerate(units)}
    keyed = [((record["problem"], record["chain"]), record) for record in store.records]
    return [record for key, record in sorted(keyed, key=lambda pair: (place.get(pair[0], len(place)), pair[0]))]


def _write(store: RunStore, config: Config, units: list[Unit]) -> dict:
    """Summary, tables and figures into the run folder, from its records alone; returns what is in `summary.json`."""
    from dflash_mcmc.report import figure

    records = _in_order(store, units)
    summary = config.probe.summarise(config, records)
    written = {"condition": config.label(), "probe": name_of(config.probe), "num_units": len(records), **summary.values,
               "tables": summary.tables}
    store.write_summary(written)
    for name, rows in {**summary.tables, **summary.data}.items():
        write_atomically(store.folder / f"{name}.csv", csv_of(rows))
    with figure.style():
        for name, drawn in config.probe.figures(config, records, summary).items():
            figure.save(drawn, store.folder, name)
    return written


def _metrics(record: dict, prefix: str = "unit") -> dict[str, float]:
    """The numbers of a record, those of its dictionaries too."""
    found = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found.update(_metrics(value, f"{prefix}/{name}"))
        elif isinstance(value, (int, float)):
            found[f"{prefix}/{name}"] = float(value)
    return found
