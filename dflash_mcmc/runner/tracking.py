"""Logs a run to its tracker, and decides what a later start of the run still has to log.

A run that is killed after its last record has not logged its summary, and a run without a tracker has logged nothing.
`tracked.json` holds what each tracker has received, so the next start logs the rest, even if no task is left.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_mcmc.components import groups_of, name_of, spec_of, walk
from dflash_mcmc.config.identity import plain, with_fields
from dflash_mcmc.config.schema import Job, component_of
from dflash_mcmc.errors import UserError, note
from dflash_mcmc.grading.verdicts import CORRECT
from dflash_mcmc.process import ranks
from dflash_mcmc.process.stopping import Stopped
from dflash_mcmc.statistics import summaries
from dflash_mcmc.statistics.estimates import wilson
from dflash_mcmc.statistics.votes import Vote
from dflash_mcmc.store.files import is_there, write_atomically
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.records import LENGTH, TRACKED, Record, finish_counts, hash_of, json_object
from dflash_mcmc.tracker import Guarded, RunInfo

_TRY_SECONDS = 5.0
_LEAVE_SECONDS = 10.0
"""Longest wait for another process to finish its tracker, for example W&B's upload."""


class Tracking:
    """Logs one run to its tracker. Leaving the context ends the tracking, with an error code if the run is incomplete.

    One process at a time logs the records of all processes of a run; when it leaves, another continues. Tracking does
    nothing with `tracker=none`, and in all processes of a launch except the first.

    Args:
        metrics: the numbers of a record. For records with a verdict the running accuracy is logged too.
    """

    def __init__(self, store: RunStore, job: Job, digest: str, metrics: Callable[[dict], Mapping[str, float | None]]):
        self._store, self._job, self._digest, self._metrics = store, job, digest, metrics
        tracker = job.config.tracker
        self._active = not ranks.rank() and not tracker.is_null
        self._key = tracker.key()
        self._running = RunningAccuracy()
        self._summary: str | None = None
        self._tracker: Guarded | None = None
        self._seen, self._tried = 0, -math.inf
        self._logged: Counter[int] = Counter()
        """Number of lines of each file of records that the tracker has received."""

    def __enter__(self) -> "Tracking":
        return self

    def start(self) -> None:
        """Opens the tracker, unless another process logs to it, and logs the records that it lacks."""
        if not self._active or self._tracker is not None or not self._store.lead():
            return
        config = self._job.config
        self._tracker = Guarded(config.tracker, RunInfo(self._digest, config.name, config.label(), plain(config),
                                                        self._store.folder, readable_name(self._job), tags(self._job)))
        logged = self._read().get(self._key, {"lines": {}})["lines"]
        self._logged = Counter({int(file): lines for file, lines in logged.items()})
        for record, (file_number, line) in zip(self._store.records, self._store.places, strict=True):
            if line < self._logged[file_number]:  # the running accuracy goes on from where the last start left it
                self._running.add(record)
        self.catch_up()

    def catch_up(self) -> None:
        """Logs the records that the tracker lacks. If the process that logged has left, this one continues."""
        if self._tracker is None:
            if self._active and time.monotonic() - self._tried > _TRY_SECONDS:
                self._tried = time.monotonic()
                self.start()
            return
        fresh = range(self._seen, len(self._store.records))
        for record, (file_number, line) in ((self._store.records[i], self._store.places[i]) for i in fresh):
            if line >= self._logged[file_number]:
                self._running.add(record)
                self._logged[file_number] = line + 1
                values, step = {**self._metrics(record), **self._running.metrics()}, self._logged.total()
                self._tracker.tell(lambda run, values=values, step=step: run.log(values, step))  # type: ignore[misc]
        self._seen = len(self._store.records)
        if fresh and self._tracker.works:
            self._write(None)

    def complete(self, metrics: dict, tables: dict[str, list[dict]] | None = None, figures: Sequence[Path] = ()) -> None:
        """Logs the summary and the files of a complete run. A tracker gets them again only if the summary is another.

        Args:
            metrics: numbers of the run.
            tables: rows with the same keys, by name.
            figures: PNG files.
        """
        if not self._active or not self._store.records:
            return
        # Asked again after the wait for the lead: the process that had it may have logged the summary.
        summary = hash_of(metrics)
        if self._tracker is None and not self._has(summary):
            if not self._store.lead(_LEAVE_SECONDS):
                note(f"{self._store.folder}: another process is still working on this run and logs it to the tracker")
            elif not self._has(summary):
                self.start()
        if self._tracker is None:
            return
        self.catch_up()
        self._tracker.tell(lambda run: run.summary(metrics, self._store.records))
        self._tracker.tell(lambda run: run.publish(self._store.folder, tables or {}, list(figures)))
        self._summary = summary

    def _has(self, summary: str) -> bool:
        """Whether the tracker has the summary with this hash."""
        return self._read().get(self._key, {}).get("summary") == summary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._tracker is not None:
            if kind is Stopped:
                self._tracker.tell(lambda run: run.preempt())
            self._tracker.tell(lambda run: run.finish(0 if self._summary else 1))
            if self._summary and self._tracker.works:
                self._write(self._summary)

    def _read(self) -> dict[str, dict]:
        """For each tracker: the lines that it has of each file of records, and the hash of its summary."""
        path = self._store.folder / TRACKED
        if not is_there(path):
            return {}
        try:
            received = json_object(path)
        except UserError as error:  # a failing machine can leave it empty
            note(f"{error}; every record is logged again")
            return {}
        lines = {key: value.get("lines") for key, value in received.items() if isinstance(value, dict)}
        return {key: received[key] for key, counts in lines.items() if isinstance(counts, dict)
                and all(file.isdecimal() and type(count) is int for file, count in counts.items())}

    def _write(self, summary: str | None) -> None:
        logged = {"lines": {str(file): lines for file, lines in self._logged.items()}, "summary": summary}
        with self._store.mutex():  # not durable: a chart can lose values if the machine fails; the records keep them
            write_atomically(self._store.folder / TRACKED, json.dumps({**self._read(), self._key: logged}), durable=False)


class RunningAccuracy:
    """The share of correct samples among those recorded so far, with Wilson's interval.

    The interval counts problems, not samples, because the chains of one problem are not independent. With several chains it
    is wider than the interval of the summary, which bootstraps problems.
    """

    def __init__(self):
        self._correct, self._samples = 0, 0
        self._problems: set[str] = set()

    def add(self, record: Mapping[str, Any]) -> None:
        """Counts a sample. A record without a verdict is ignored."""
        if "verdict" in record:
            self._correct += record["verdict"] == "correct"
            self._samples += 1
            self._problems.add(record["problem"])

    def metrics(self) -> dict[str, float | None]:
        """`running/accuracy`, `running/accuracy_low` and `running/accuracy_high`; empty before the first sample."""
        if not self._samples:
            return {}
        share, problems = self._correct / self._samples, len(self._problems)
        interval = wilson(round(share * problems), problems)
        return {"running/accuracy": share, "running/accuracy_low": interval.low, "running/accuracy_high": interval.high}


def readable_name(job: Job) -> str:
    """The label, and the overrides that the identity depends on and that the label does not contain: `ps alpha=2 seed=1`.

    Overrides that equal the default are included, so that the points of a sweep have names of the same form.
    """
    config, given = job.config, dict(text.lstrip("+").partition("=")[::2] for text in job.overrides if text[0] != "~")
    fields = {name for name, field, _, _ in walk(config) if spec_of(field).role == "identity"}
    for group in groups_of(config):
        fields.add(f"{group}.path")  # the content of the path is part of the identity
        in_label = group in ("probe", "blend", "sampler")
        if not config.condition.name:  # several options can name the same component: draft=tiny is a dflash
            in_label = (in_label or group in ("draft", "decoder")) and given.get(group) == name_of(component_of(config, group))
        if not in_label and f"{group}.path" not in given:
            fields.add(group)
    return with_fields(config.label(), {name: value for name, value in given.items() if name in fields})


def tags(job: Job) -> tuple[str, ...]:
    """`dataset=arith`, `model=tiny`, ...: the components that the outputs depend on, in the words of the command line."""
    config = job.config
    used = {group: component_of(config, group) for group in groups_of(config) if group != "grader"}
    return tuple(f"{group}={job.choices.get(group, name_of(each))}" for group, each in used.items() if not each.is_null)


def metrics_of(record: Record) -> dict[str, float | None]:
    """The numbers of a sample that a tracker logs."""
    metrics: dict[str, float | None] = {
        "sample/correct": float(record["verdict"] == CORRECT), "sample/num_tokens": record["num_tokens"],
        "sample/cut_off": float(record["finish_reason"] == LENGTH),
        "sample/log_p": record["log_p"], "sample/seconds": record["seconds"],
        "sample/token_forwards": record["token_forwards"]}
    if record["proposals"]:
        metrics["sample/acceptance"] = record["accepted"] / record["proposals"]
        metrics["sample/moved_rate"] = record["moved"] / record["proposals"]
        metrics["sample/abandoned_rate"] = record["abandoned"] / record["proposals"]
    metrics |= {f"sample/{name}": value for name, value in record.get("measures", {}).items()}
    if (length := summaries.accepted_length([record])) is not None:
        metrics["sample/accepted_length"] = length
    return metrics


def summary_of(label: str, records: Sequence[Record], aggregates: Sequence[str], vote: Vote, num_chains: int) -> dict:
    """The content of `summary.json`."""
    summary = {**summaries.summarise(label, records), **summaries.rates(records), **finish_counts(records),
               **summaries.measures(records), **summaries.beside(records),
               **summaries.times(records)}
    for name in aggregates:
        summary |= summaries.aggregate(label, records, vote.rules.get(name, name), num_chains)
    return summary
