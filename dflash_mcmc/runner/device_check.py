"""Is it the device that fails, or the task? A recorded task that is done again on the device answers this.

A task that has killed its process `hardware.max_attempts` times while it was done alone is recorded as failed. A device that
fails kills every task. Where all of these deaths were on one device, a process on that device first does a task again that is
recorded already. If the process survives, the task was the cause. If it dies as well, the device is the cause: the run ends
there with a line, and the task is left to another device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dflash_mcmc.errors import UserError
from dflash_mcmc.runner.tasks import Tasks, Worker
from dflash_mcmc.store.attempts import Attempts
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.records import SampleKey, key_of


class DeviceCheck:
    """Checks the device of this process before a task is recorded as failed.

    Args:
        pending: the tasks that this process wants to do.
        most: `hardware.max_attempts`, the number of deaths that is one too many.
    """

    def __init__(self, tasks: Tasks, store: RunStore, attempts: Attempts, pending: Sequence[SampleKey], most: int):
        self._tasks, self._store, self._attempts, self._most = tasks, store, attempts, most
        doubtful = any(map(attempts.blames_device, pending))
        self.prepared: list[SampleKey] = [*pending, *([] if not doubtful else self._done_among(tasks.keys())[:1])]
        """The tasks that the worker must be prepared for: the pending ones and, if needed, one that is recorded."""

    def run(self, key: SampleKey, worker: Worker) -> None:
        """Returns if the task may be tried or recorded as failed. Raises UserError if the device is the cause."""
        if not self._attempts.blames_device(key):
            return
        done = self._done_among(self.prepared)
        if not done:
            if len(self.prepared) > 1:
                raise UserError(self._refusal(key, "no task of the run was ever done"))
            return  # the run has no other task
        again = done[0]
        if self._attempts.failed_checks() >= self._most:
            raise UserError(self._refusal(key, f"{self._attempts.failed_checks()} times while problem {again[0]}, chain "
                                               f"{again[1]}, was done again, which is recorded"))
        self._attempts.begin(again, alone=True, check=True)
        try:
            records = [record for record in worker.do([again], iter([again])) if record is not None]
        finally:  # whatever is raised, the process lives
            self._attempts.give_up(again)
        if not all(map(self._tasks.is_done, records)):
            raise UserError(self._refusal(key, f"problem {again[0]}, chain {again[1]}, which is recorded, failed there"))

    def _done_among(self, keys: Iterable[SampleKey]) -> list[SampleKey]:
        done = {key_of(record) for record in self._store.records if self._tasks.is_done(record)}
        return [key for key in keys if key in done]

    def _refusal(self, key: SampleKey, also: str) -> str:
        return (f"hardware.device: given {self._attempts.device}, where the process died {self._most} times or more while "
                f"problem {key[0]}, chain {key[1]}, was in progress alone, and {also}; allowed: another device, with the same "
                f"command: this one seems to fail, or is too small (hardware.max_attempts={self._most})")
