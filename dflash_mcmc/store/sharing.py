"""The locks of a run folder that processes share. Each byte of a lock file guards what only one process may do at a time."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_mcmc.errors import RunBusy, UserError
from dflash_mcmc.store.locks import Locks, is_locked
from dflash_mcmc.store.records import NUM_FILES, SampleKey

_MOST_TRIES = 100
"""Number of tries to make a folder. Some file systems report "does not exist" for a folder that can never be made."""
_MUTEX, _LEAD, _SUMMARY, _WRITERS = 0, 1, 2, 3
_TASKS = _WRITERS + NUM_FILES
"""First bytes of the locked ranges. They are for changes of the folder, for the tracker, for files that are written from all
records, for record files by number, and for tasks by hash."""
_LOOK_SECONDS = 0.1


class FolderLocks:
    """The locks of a run folder. The constructor takes the mutex. The caller then calls `enter` and `free_mutex`.

    Raises UserError if the folder cannot be made or its file system has no locks, RunBusy if this process has it open.
    """

    def __init__(self, folder: Path):
        self.made = [each for each in (folder, *folder.parents) if not each.exists()]
        """The folders that were not there, the innermost first."""
        self._folder, self._locks = folder, _open(folder)
        self._number, self._leads = 0, False

    def close(self) -> None:
        """Releases all locks."""
        self._locks.close()

    def enter(self) -> int:
        """Takes the number of a file of records that no other process writes to. Raises RunBusy."""
        found = next((number for number in range(NUM_FILES) if self._locks.take(_WRITERS + number)), None)
        if found is None:
            raise RunBusy(f"{self._folder}: {NUM_FILES} processes draw this run already")
        self._number = found
        return found

    def take_mutex(self) -> None:
        """Waits until no other process changes the folder."""
        self._locks.take(_MUTEX, wait=True)

    def free_mutex(self) -> None:
        """Lets other processes change the folder."""
        self._locks.free(_MUTEX)

    def exclude_all(self) -> bool:
        """Keeps all processes from entering. Returns False if one has entered."""
        return self._locks.take(_WRITERS, NUM_FILES)

    def is_alone(self) -> bool:
        """Whether no other process has entered. The mutex must be held, so that no process enters meanwhile."""
        alone = self.exclude_all()
        if alone:  # the call has locked the numbers of all processes
            self._locks.free(_WRITERS, self._number)
            self._locks.free(_WRITERS + self._number + 1, NUM_FILES - self._number - 1)
        return alone

    def lead(self, seconds: float) -> bool:
        """Whether this process logs to the tracker. It takes the role if it is or becomes free within `seconds`."""
        until = time.monotonic() + seconds
        while not self._leads:
            self._leads = self._locks.take(_LEAD)
            if self._leads or time.monotonic() >= until:
                break
            time.sleep(_LOOK_SECONDS)
        return self._leads

    @contextmanager
    def summary(self) -> Iterator[None]:
        """A lock to hold while files are written from all records."""
        try:
            self._locks.take(_SUMMARY, wait=True)
            yield
        finally:
            self._locks.free(_SUMMARY)

    def take(self, key: SampleKey) -> bool:
        """Locks a task. Returns False if another process has locked it."""
        return self._locks.take(_byte(key))

    def free(self, key: SampleKey) -> None:
        """Releases a task."""
        self._locks.free(_byte(key))

    def num_files(self) -> int:
        """The number of files of records, as `raise_num_files` has written it."""
        return self._locks.number(NUM_FILES)

    def raise_num_files(self, count: int) -> None:
        """Raises the number of files to `count`. The mutex must be held. The number never decreases.

        The number shows other processes which files exist. A network file system may list a new file late.
        """
        if count > self.num_files():
            self._locks.set_number(count)


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Keeps all processes from opening a run's folder. Raises RunBusy if one has it open."""
    locks = FolderLocks(folder)
    try:
        if not locks.exclude_all():
            raise RunBusy(f"{folder}: this run is being written by another process; wait for it or stop it")
        yield
    finally:
        locks.close()


def is_open(folder: Path) -> bool:
    """Whether another process has a run's folder open. Nothing is written, and no process has to wait for this one.

    Raises UserError if the lock file cannot be asked.
    """
    return is_locked(folder / "lock", _WRITERS, NUM_FILES)


def _open(folder: Path) -> Locks:
    """Makes the folder, opens its locks and takes the mutex."""
    tries = 0
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            locks = Locks(folder / "lock")
        except OSError as error:
            tries += 1
            if isinstance(error, FileNotFoundError) and tries < _MOST_TRIES:  # another process has just removed the folder
                continue
            raise UserError(f"paths.outputs: cannot write to {folder}: {error.strerror}") from error
        try:
            locks.take(_MUTEX, wait=True)
        except BaseException:
            locks.close()
            raise
        if locks.exists():
            return locks
        locks.close()


def _byte(key: SampleKey) -> int:
    """The byte that locks a task. It is a hash of 62 bits, so processes need no common numbering of the tasks."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return _TASKS + (int.from_bytes(digest) >> 2)
