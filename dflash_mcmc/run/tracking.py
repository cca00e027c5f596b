"""A run and its tracker: what is told when, under which name, and what a later start makes good.

A run that is killed behind its last record has not told its summary; one that was drawn without a tracker has told nothing.
`tracked.json` keeps what each tracker has been told, so that the next start tells the rest, even where it has nothing to draw.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from dflash_mcmc.config.identity import plain
from dflash_mcmc.config.schema import Config, component_of, groups_of
from dflash_mcmc.errors import note
from dflash_mcmc.fields import spec_of, walk
from dflash_mcmc.process import ranks
from dflash_mcmc.process.stopping import Stopped
from dflash_mcmc.registry import name_of
from dflash_mcmc.statistics.shares import wilson
from dflash_mcmc.store.files import write_atomically
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.tracker import Guarded, RunInfo

if TYPE_CHECKING:
    from hydra.conf import HydraConf

_LONGEST_VALUE = 40
_TRACKED = "tracked.json"
_TRY_SECONDS = 5.0
_LEAVE_SECONDS = 10.0
"""For what a process does last: W&B ends its upload."""


class Tracking:
    """What one run tells its tracker. A context: leaving it ends the tracking, with an error unless it is complete.

    Of the processes that draw a run one at a time tells its tracker, of all their records; when it leaves, another goes on.
    Does nothing with `tracker=none`, and in all processes of a launch but the first.

    Args:
        metrics: the numbers of a record. Records with a verdict get the running accuracy besides.
    """

    def __init__(self, store: RunStore, config: Config, digest: str, metrics: Callable[[dict], dict[str, float]]):
        self._store, self._config, self._digest, self._metrics = store, config, digest, metrics
        self._active = not ranks.rank() and not config.tracker.is_null
        self._key = config.tracker.key()
        self._running, self._tracker, self._complete = RunningAccuracy(), None, False
        self._seen, self._tried = 0, -math.inf
        self._told: Counter[int] = Counter()
        """Lines of each file of records that the tracker was told."""

    def __enter__(self) -> Tracking:
        return self

    def start(self) -> None:
        """Opens the tracker, where no other process tells it, and tells what it lacks: no chart begins late."""
        if not self._active or self._tracker is not None or not self._store.lead():
            return
        config = self._config
        self._tracker = Guarded(config.tracker, RunInfo(self._digest, config.name, config.label(), plain(config),
                                                        self._store.folder, readable_name(config), tags(config)))
        told = self._read().get(self._key, {"lines": {}})["lines"]
        self._told = Counter({int(number): lines for number, lines in told.items()})
        for record, (number, line) in zip(self._store.records, self._store.places, strict=True):
            if line < self._told[number]:
                self._running.add(record)
        self.catch_up()

    def catch_up(self) -> None:
        """Tells what is recorded and not told. Takes over from a process that told the tracker and has left."""
        if self._tracker is None:
            if self._active and time.monotonic() - self._tried > _TRY_SECONDS:
                self._tried = time.monotonic()
                self.start()
            return
        fresh = range(self._seen, len(self._store.records))
        for record, (number, line) in ((self._store.records[i], self._store.places[i]) for i in fresh):
            if line >= self._told[number]:
                self._running.add(record)
                self._told[number] = line + 1
                self._tracker.log({**self._metrics(record), **self._running.metrics()}, self._told.total())
        self._seen = len(self._store.records)
        if fresh and self._tracker.works:
            self._write(None)

    def complete(self, summary: dict, tables: dict[str, list[dict]] | None = None, figures: Sequence[Path] = ()) -> None:
        """Everything is recorded and written: the summary, and what stands in the run's folder. Once for so many records.

        Args:
            tables: by name, rows with the same keys.
            figures: PNG files.
        """
        if not self._active or not self._store.records:
            return
        if self._tracker is None and (self._is_told() or not self._leads() or self._is_told()):
            return
        self.start()
        self.catch_up()
        self._tracker.summary(summary, self._store.records)
        self._tracker.publish(self._store.folder, tables or {}, list(figures))
        self._complete = True

    def _is_told(self) -> bool:
        """Whether the tracker has the summary of as many records."""
        return self._read().get(self._key, {}).get("summary") == len(self._store.records)

    def _leads(self) -> bool:
        """Whether this process is the one that tells it. Another that ends just now is waited for."""
        if self._store.lead(_LEAVE_SECONDS):
            return True
        note(f"{self._store.folder}: another process draws more of this run and tells the tracker of it")
        return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._tracker is not None:
            if kind is Stopped:
                self._tracker.preempt()
            self._tracker.finish(0 if self._complete else 1)
            if self._complete and self._tracker.works:
                self._write(len(self._store.records))

    def _read(self) -> dict[str, dict]:
        """By tracker that was told of this run: lines told of each file of records, and number of records of its summary."""
        path = self._store.folder / _TRACKED
        try:
            return json.loads(path.read_text())
        except (FileNotFoundError, ValueError):  # a machine that fails can leave it empty: all is told again
            return {}

    def _write(self, summary: int | None) -> None:
        told = {"lines": {str(number): lines for number, lines in self._told.items()}, "summary": summary}
        with self._store.mutex():  # a machine that fails loses a chart's points, which are in the records: not durable
            write_atomically(self._store.folder / _TRACKED, json.dumps({**self._read(), self._key: told}), durable=False)


class RunningAccuracy:
    """Share of correct samples among those recorded so far, with Wilson's interval.

    The interval counts problems, not samples: chains of one problem are not independent. With several chains it is wider than
    that of the summary, for which problems are drawn anew.
    """

    def __init__(self):
        self._correct, self._samples = 0, 0
        self._problems: set[str] = set()

    def add(self, record: dict) -> None:
        """Counts a sample; a record without a verdict is none."""
        if "verdict" in record:
            self._correct += record["verdict"] == "correct"
            self._samples += 1
            self._problems.add(record["problem"])

    def metrics(self) -> dict[str, float]:
        """`running/accuracy`, `running/accuracy_low` and `running/accuracy_high`; nothing before the first sample."""
        if not self._samples:
            return {}
        share, problems = self._correct / self._samples, len(self._problems)
        interval = wilson(round(share * problems), problems)
        return {"running/accuracy": share, "running/accuracy_low": interval.low, "running/accuracy_high": interval.high}


def readable_name(config: Config) -> str:
    """The label, and what the command line sets of what tells runs apart: `ps alpha=2 seed=1`.

    All of it is shown, a default that is written out too, so that the points of a sweep are named alike.
    """
    return " ".join([config.label(), *_distinguishing(config, _hydra().overrides.task if _hydra() else [])])


def tags(config: Config) -> tuple[str, ...]:
    """`dataset=arith`, `model=tiny`, ...: what the outputs come from, in the words of the command line."""
    chosen = _hydra().runtime.choices if _hydra() else {}
    groups = [group for group in groups_of(config) if group != "grader"]
    parts = {group: component_of(config, group) for group in groups}
    return tuple(f"{group}={chosen.get(group, name_of(part))}" for group, part in parts.items() if not part.is_null)


def _hydra() -> HydraConf | None:
    """What Hydra knows of this job; None where the configuration was not composed by a command."""
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get() if HydraConfig.initialized() else None


def _distinguishing(config: Config, given: Sequence[str]) -> list[str]:
    """Of the overrides those that the identity depends on and that the label does not tell, each field by its last name."""
    groups = groups_of(config)
    fields = {name for name, field, _, _ in walk(config) if spec_of(field).role == "identity"}
    fields |= {f"{group}.path" for group in groups}  # what is there is part of the identity
    pairs = [text.lstrip("+").partition("=")[::2] for text in given if not text.startswith("~")]
    pairs = [(name, value) for name, value in pairs
             if name in fields or (name in groups and not _in_label(config, name, value))]
    lasts = [name.rpartition(".")[2] for name, _ in pairs]
    return [f"{last if lasts.count(last) == 1 else name}={_short(value)}"
            for (name, value), last in zip(pairs, lasts, strict=True)]


def _in_label(config: Config, group: str, option: str) -> bool:
    if config.condition.name:
        return group in ("probe", "blend", "sampler")
    # An option can be one of several that name the same component: draft=tiny is a dflash.
    return group in ("probe", "blend", "draft", "sampler", "decoder") and option == name_of(component_of(config, group))


def _short(value: str) -> str:
    """A long text by its end, which in a path is what differs."""
    return value if len(value) <= _LONGEST_VALUE else f"…{value[1 - _LONGEST_VALUE:]}"
