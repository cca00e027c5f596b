"""Locks on parts of one file, for the processes of one machine, or of many machines that share a folder.

They are POSIX record locks (fcntl). The kernel or the file server releases them when a process ends, for whatever reason, so
there are no clocks, no leases and no stale lock files. They work on local file systems, NFS 4 (and NFS 3 with its lock
daemon), Lustre mounted with `flock`, CephFS, GPFS, and BeeGFS with `tuneUseGlobalFileLocks`. On Lustre mounted with
`localflock` each node has its own locks, and two nodes would draw the same sample.

A lock belongs to the process, not to the object. Two parts of one process do not exclude each other, and closing the file
anywhere in the process releases all its locks. `Locks` therefore opens a file only once in a process.

`FolderLocks` are those of a run folder: each byte of its lock file guards what only one process may do at a time.
"""

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from dflash_mcmc.errors import RunBusy, UserError, note, writing
from dflash_mcmc.store.files import is_there, refuse_link
from dflash_mcmc.store.records import NUM_FILES, SampleKey

_DIGITS = 8
_MOST_SECONDS, _TOLD_SECONDS = 600.0, 10.0
"""Longest wait for a lock, and the wait after which a line says what for. Locks that are waited for are held for moments, or
for the time that a summary with its figures takes."""
_LEAST_PAUSE, _MOST_PAUSE = 0.001, 0.1
_open: set[Path] = set()


class Locks:
    """The locks of a file. Their byte offsets may lie after its end.

    Raises RunBusy if this process has the file open, UserError if the path is not that of a regular file.
    """

    def __init__(self, path: Path):
        refuse_link(path)
        is_there(path)
        self._path = path.resolve()
        if self._path in _open:
            raise RunBusy(f"{path.parent}: this process has that run open already")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        _open.add(self._path)

    def close(self) -> None:
        """Releases all locks."""
        _open.discard(self._path)
        os.close(self._file)

    def exists(self) -> bool:
        """Whether the path still leads to this file. Another process can have removed it."""
        try:
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:  # it does not exist, or a file server has removed its folder
            return False

    def take(self, first: int, length: int = 1, wait: bool = False) -> bool:
        """Locks bytes. Returns False if another process has locked any of them. Raises UserError.

        Args:
            wait: whether to wait until no other process has them locked. The wait has a bound, because the other process may
                be stopped or hang. Raises RunBusy after it.
        """
        started, pause, shown = time.monotonic(), _LEAST_PAUSE, False
        while not self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, first, length):
            waited = time.monotonic() - started
            if not wait:
                return False
            if waited > _MOST_SECONDS:
                raise RunBusy(f"{self._path}: another process has been changing files of this folder for {_MOST_SECONDS:.0f} "
                              "seconds; continue or end that process, and run the same command again; nothing recorded is "
                              "lost")
            if waited > _TOLD_SECONDS and not shown:
                shown = True
                note(f"{self._path}: waiting, for at most {_MOST_SECONDS:.0f} seconds, until another process has changed "
                     "files of this folder")
            time.sleep(pause)
            pause = min(2.0 * pause, _MOST_PAUSE)
        return True

    def free(self, first: int, length: int = 1) -> None:
        """Releases bytes, whether or not they are locked. Raises UserError."""
        if length:  # for fcntl a length of 0 means all bytes that follow
            self._lock(fcntl.LOCK_UN, first, length)

    @contextmanager
    def held(self, first: int) -> Iterator[None]:
        """Waits for a byte, and holds it."""
        try:
            self.take(first, wait=True)
            yield
        finally:
            self.free(first)

    def _lock(self, operation: int, first: int, length: int) -> bool:
        """Locks or unlocks bytes. False if another process has locked any of them. Raises UserError."""
        try:
            fcntl.lockf(self._file, operation, length, first)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN) and operation != fcntl.LOCK_UN:
                return False
            what = "unlock" if operation == fcntl.LOCK_UN else "lock"
            raise UserError(f"paths.outputs: cannot {what} {self._path}: {error.strerror}; allowed: a file system with POSIX "
                            "record locks, such as a local one, NFS 4, or Lustre mounted with flock") from error
        return True


_MOST_TRIES = 100
"""Number of tries to make a folder. Some file systems report "does not exist" for a folder that can never be made."""
MUTEX, SUMMARY, _LEAD, _WRITERS = 0, 2, 1, 3
_TASKS = _WRITERS + NUM_FILES
"""First bytes of the locked ranges. They are for changes of the folder, for files that are written from all records, for the
tracker, for record files by number, and for tasks by hash."""
_LOOK_SECONDS = 0.1


class FolderLocks(Locks):
    """The locks of a run folder. The constructor makes the folder and takes `MUTEX`, which the caller frees after `enter`.

    Raises UserError if the folder cannot be made or its file system has no locks, RunBusy if this process has it open.
    """

    def __init__(self, folder: Path):
        self.made = [each for each in (folder, *folder.parents) if not each.exists()]
        """The folders that were not there, the innermost first."""
        self._number, self._leads, tries = 0, False, 0
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                super().__init__(folder / "lock")
            except OSError as error:
                tries += 1
                if isinstance(error, FileNotFoundError) and tries < _MOST_TRIES:  # another process has just removed the folder
                    continue
                raise UserError(f"paths.outputs: cannot write to {folder}: {error.strerror}") from error
            try:
                self.take(MUTEX, wait=True)
            except BaseException:
                self.close()
                raise
            # Another process can have removed the folder before the lock was taken: nobody else would see these locks.
            if self.exists():
                return
            self.close()

    def enter(self) -> int:
        """Takes the number of a file of records that no other process writes to. Raises RunBusy."""
        for file_number in range(NUM_FILES):
            if self.take(_WRITERS + file_number):
                self._number = file_number
                return file_number
        raise RunBusy(f"{self._path.parent}: {NUM_FILES} processes draw this run already")

    def exclude_all(self) -> bool:
        """Keeps all processes from entering. Returns False if one has entered."""
        return self.take(_WRITERS, NUM_FILES)

    def is_alone(self) -> bool:
        """Whether no other process has entered. `MUTEX` must be held, so that no process enters meanwhile."""
        alone = self.exclude_all()
        if alone:  # the call has locked the numbers of all processes
            self.free(_WRITERS, self._number)
            self.free(_WRITERS + self._number + 1, NUM_FILES - self._number - 1)
        return alone

    def lead(self, seconds: float) -> bool:
        """Whether this process logs to the tracker. It takes the role if it is or becomes free within `seconds`."""
        until = time.monotonic() + seconds
        while not self._leads:
            self._leads = self.take(_LEAD)
            if self._leads or time.monotonic() >= until:
                break
            time.sleep(_LOOK_SECONDS)
        return self._leads

    def num_files(self) -> int:
        """The number of files of records; 0 in a new file, and one of zeros that a power loss has left.

        After a lock is taken, it comes from the file server and not from a cache. Raises UserError for any other content.
        """
        content = os.pread(self._file, _DIGITS + 1, 0).rstrip(b"\0")
        if content and (not content.isdigit() or len(content) > _DIGITS or int(content) > NUM_FILES):
            raise UserError(f"{self._path}: given {content!r}; allowed: a number up to {NUM_FILES}; delete the file while no "
                            "process draws the run")
        return int(content or 0)

    def raise_num_files(self, count: int) -> None:
        """Raises the number of files to `count`. `MUTEX` must be held. The number never decreases. Raises UserError.

        The number shows other processes which files exist. A network file system may list a new file late.
        """
        if count > self.num_files():
            with writing(self._path):
                os.pwrite(self._file, b"%0*d" % (_DIGITS, count), 0)  # in one write, so no reader sees a part of it
                os.fsync(self._file)


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Keeps all processes from opening a run's folder. Raises RunBusy if one has it open."""
    with closing(FolderLocks(folder)) as locks:
        if not locks.exclude_all():
            raise RunBusy(f"{folder}: this run is being written by another process; wait for it or stop it")
        yield


def task_byte(key: SampleKey) -> int:
    """The byte that locks a task. It is a hash of 62 bits, so processes need no common numbering of the tasks."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return _TASKS + (int.from_bytes(digest) >> 2)
