"""The loop of a run. It finds, claims and does the pending tasks, records and tracks each, and summarises the complete run.

It writes where the records come from: configuration, identity, command, commit, packages and device of each start.

A run that is killed after its last record has not logged its summary, and a run without a tracker has logged nothing.
`tracked.json` holds what each tracker has received, so the next start logs the rest, even if no task is left.
"""

import datetime
import importlib.metadata
import itertools
import json
import math
import platform
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_mcmc.components import groups_of, name_of, spec_of, walk
from dflash_mcmc.config.identity import as_yaml, identity_of, label_of, plain, run_folder, with_fields
from dflash_mcmc.config.schema import PACKAGE, Config, Job, component_of
from dflash_mcmc.errors import UserError, note, of_memory, tell
from dflash_mcmc.process import bars, machine, ranks, stopping
from dflash_mcmc.runner.tasks import Tasks, Worker, tasks_of
from dflash_mcmc.statistics.estimates import wilson
from dflash_mcmc.store.files import is_there, read_regular, write_atomically
from dflash_mcmc.store.folder import Attempts, RunStore
from dflash_mcmc.store.records import CONFIG, PROBLEMS, TRACKED, SampleKey, add_problems, hash_of, json_object, key_of
from dflash_mcmc.tracker import Guarded, RunInfo
from dflash_mcmc.types import RunResult

_POLL_SECONDS = 0.5
_MOST_TRIED = 64
"""Largest number of other processes' tasks to try to lock in one turn. On a network file system each try costs a message."""


def execute(job: Job) -> RunResult:
    """Does the tasks that the run lacks and summarises the run. A complete run loads no model. Raises UserError and Stopped.

    Any number of processes can share a run. Each does the tasks that no other has claimed. One process at a time logs to the
    tracker. The first process of a launch waits for the others' tasks.
    """
    config, tasks = job.config, tasks_of(job.config, job.prompts)
    identity, keys = identity_of(config), tasks.keys()
    digest = hash_of(identity)
    with stopping.handling_signals(config.hardware.grace_seconds):
        with (RunStore.open(run_folder(config, digest), tasks.not_in_memory, tasks.schema(), config.repair, digest) as store,
              Tracking(store, job, digest, tasks.metrics) as tracking):
            recorded = store.recorded()
            pending = [key for key in keys if key not in recorded]
            num_own = 0
            if pending:
                num_own = _Loop(store, job, identity, tasks, pending, tracking).run()
            elif not ranks.rank() and len(store.records) <= len(keys):  # a command for a part describes no run
                renew(store, config, identity, tasks)
            store.look_again()  # after its last record: the last process to look sees the complete run
            left = set(keys) - store.recorded()
            summary: dict[str, object] = {}
            if not left:
                with store.summarising():
                    results, figures = tasks.summarise(store.in_order(keys)), []
                    if not ranks.rank():
                        store.write_summary(results.summary)
                        figures = results.write(store.folder)
                summary = results.summary
                tracking.complete(results.metrics, results.tables, figures)
            new = len(set(pending) - left)
            num_beyond = 0 if left else len(store.records) - len(keys)
            result = RunResult(store.folder, summary, new, new - num_own, num_beyond, len(left), tasks.unit, tasks.table)
        stopping.check()
    return result


class _Loop:
    """Does the pending tasks that no other process does. Tasks in progress are given up when the run is stopped."""

    def __init__(self, store: RunStore, job: Job, identity: dict[str, object], tasks: Tasks,
                 pending: Sequence[SampleKey], tracking: "Tracking"):
        self._store, self._config, self._identity, self._tasks = store, job.config, identity, tasks
        self._pending, self._tracking, self._title = pending, tracking, job.title or label_of(job.config)
        self._attempts = Attempts(store)
        self._num_before, self._num_shown, self._num_own, self._is_described = len(store.records), 0, 0, False
        self._in_progress: set[SampleKey] = set()
        self._device = job.config.hardware.resolve()
        self._worker: Worker
        self._bar: bars.Bar

    def run(self) -> int:
        """Returns how many tasks this process has recorded, when nothing is left for it. Raises UserError and Stopped."""
        self._worker = self._tasks.prepare(self._pending, self._device)
        self._bar = bars.Bar(len(self._pending), self._tasks.unit, self._title, shown=not ranks.rank())
        try:
            for keys, claimed in self._rounds():
                with closing(self._worker.do(keys, self._begun(claimed))) as records:
                    for record in records:
                        self._describe()
                        if record is not None:
                            self._keep(record)
                self._describe()
                self._store.sync()
            if not self._is_complete():
                stopping.check()
        except (KeyboardInterrupt, stopping.Stopped, Exception) as error:
            if isinstance(error, KeyboardInterrupt | stopping.Stopped | UserError) or of_memory(error):
                self._give_up()
            raise
        finally:
            self._bar.close()
            self._worker.close()
            self._attempts.close(complete=self._is_complete())
        self._report()
        return self._num_own

    def _rounds(self) -> Iterator[tuple[Sequence[SampleKey], Iterable[SampleKey]]]:
        """Yields rounds: (tasks, an iterator that claims them when it is consumed).

        The last rounds are for tasks that other processes have claimed and not finished.
        """
        if suspects := self._attempts.suspects(set(self._pending)):
            tell(f"{self._store.folder}: {suspects}")
        together = list(ranks.own_part_first(self._pending))
        yield together, self._store.take(together)
        turn = 0  # of the tasks that others hold: those not tried for the longest time come next
        while ranks.waits() and not self._is_complete() and not stopping.requested():
            recorded = self._store.recorded()
            left = [key for key in self._pending if key not in recorded]
            turn = turn % max(1, len(left))
            tried = [*left[turn:], *left[:turn]][:_MOST_TRIED]
            untaken = self._store.take(tried)  # those that an ended process had begun
            if (first := next(untaken, None)) is not None:
                yield tried, itertools.chain([first], untaken)
                continue
            turn += _MOST_TRIED
            time.sleep(_POLL_SECONDS)
            self._look()

    def _begun(self, claimed: Iterable[SampleKey]) -> Iterator[SampleKey]:
        """Marks each task as begun when the worker has room for it. Ends when a stop is requested.

        The engine pulls: each task is locked by `RunStore.take` when its chain is, one at a time.
        """
        for key in claimed:
            if stopping.requested():
                return
            self._attempts.note(key, begun=True)
            self._in_progress.add(key)
            yield key

    def _describe(self) -> None:
        """Describes the run in its folder and starts the tracker, once. The configuration cannot be refused after this."""
        if self._is_described:
            return
        self._is_described = True
        if not ranks.rank() or not self._store.is_described():
            describe(self._store, self._config, self._identity, self._device, self._tasks)
        with self._store.mutex():
            add_problems(self._store.folder, self._tasks.missing_problems)
        self._tracking.start()

    def _keep(self, record: Mapping[str, object]) -> None:
        self._describe()
        self._store.append(record)
        self._num_own += 1
        self._in_progress.discard(key_of(record))
        self._show()

    def _give_up(self) -> None:
        """Keeps records that are ready. The next start repeats the other tasks in progress."""
        try:
            for record in self._worker.ready():
                self._keep(record)
        finally:  # neither a stop nor memory that runs out, for all tasks together, is a death by one of them
            for key in self._in_progress:
                self._attempts.note(key, begun=False)

    def _look(self) -> None:
        """Reads what other processes have recorded."""
        self._store.refresh()
        self._show()

    def _show(self) -> None:
        self._tracking.catch_up()
        records = self._store.records
        self._bar.update(len(records) - self._num_before - self._bar.n, self._tasks.progress(records[self._num_shown :]))
        self._num_shown = len(records)

    def _is_complete(self) -> bool:
        return set(self._pending) <= self._store.recorded()

    def _report(self) -> None:
        """Writes the worker's counters into `run.json`, and prints a line about what went wrong."""
        if ranks.rank():
            return
        if counters := self._worker.counters():
            self._store.add_to_session(counters)
        if warning := self._tasks.warning(self._store.records, self._store.folder):
            tell(f"{self._store.folder}: {warning}")


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
            if kind is stopping.Stopped:
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


COMMIT_NOTE = "commit.json"
"""The file in a grid's copy of the code that holds the commit of the original."""
_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "scipy", "math-verify", "latex2sympy2_extended",
             "sympy", "matplotlib", "hydra-core", "omegaconf", "wandb", "accelerate")


def describe(store: RunStore, config: Config, identity: dict[str, object], device: str | None, tasks: Tasks) -> None:
    """Writes the configuration, the identity, and an entry for this start of the run."""
    name = None
    if device is not None:
        import torch

        is_gpu = device.startswith("cuda")
        name = torch.cuda.get_device_name(device) if is_gpu else f"{machine.cpu_name()}, {torch.get_num_threads()} threads"
    store.write_config(as_yaml(plain(config)))
    store.write_session(identity, {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.orig_argv[1:]],
        **commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "host": socket.gethostname(),
        "device": name,
        **tasks.notes(),
    })


def renew(store: RunStore, config: Config, identity: dict[str, object], tasks: Tasks) -> None:
    """Writes again what a complete run has lost, and replaces a configuration that another command wrote: reports read it."""
    if b"name" not in (read_regular(store.folder / CONFIG) or b""):
        note(f"{store.folder / CONFIG}: has no configuration, and is written again from this command")
    store.write_config(as_yaml(plain(config)))
    if not store.is_described():
        describe(store, config, identity, None, tasks)
    if not is_there(store.folder / PROBLEMS):
        with store.mutex():
            add_problems(store.folder, tasks.missing_problems)


def commit() -> dict[str, object]:
    """The commit of the code and whether the code has uncommitted changes; null outside a checkout of this project.

    In a grid's copy of the code, both are read from a file.
    """
    noted = PACKAGE.parent / COMMIT_NOTE
    if noted.is_file():
        return json_object(noted)

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        top = git("rev-parse", "--show-toplevel")
        if top is None or Path(top) != PACKAGE.parent:
            return {"commit": None, "dirty": None}
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except OSError:  # git is not installed
        return {"commit": None, "dirty": None}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
