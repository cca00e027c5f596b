"""The loop of a run. It finds, claims and does the pending tasks, records and tracks each, and summarises the complete run."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing

from dflash_mcmc.config.identity import hash_of, identity_of, label_of, run_folder
from dflash_mcmc.config.schema import Job
from dflash_mcmc.errors import UserError, of_memory, tell
from dflash_mcmc.process import bars, ranks, stopping
from dflash_mcmc.runner.provenance import describe, renew
from dflash_mcmc.runner.tasks import Tasks, Worker
from dflash_mcmc.runner.tracking import Tracking
from dflash_mcmc.runner.units import tasks_of
from dflash_mcmc.store.folder import Attempts, RunStore
from dflash_mcmc.store.records import SampleKey, add_problems, key_of
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
                 pending: Sequence[SampleKey], tracking: Tracking):
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
