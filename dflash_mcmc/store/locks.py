"""Locks that the processes of one machine, or of many that share a folder, take on parts of one file.

They are POSIX record locks (fcntl): the kernel or the file server lets go of them when a process ends, however it ends, so
there is no clock, no lease and no file of a dead process to clean up. They work on local file systems, NFS 4 (and 3 with its
lock daemon), Lustre mounted with `flock`, CephFS, GPFS, and BeeGFS with `tuneUseGlobalFileLocks`. On Lustre mounted with
`localflock` each node has locks of its own, and two nodes would draw the same sample.

A lock belongs to the process, not to the object: within a process nothing is ever locked against itself, and closing the file
anywhere in the process lets go of all. So a file is opened once in a process; `Locks` sees to it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from dflash_mcmc.errors import RunBusy, UserError, writing

_DIGITS = 8
_open: set[Path] = set()


class Locks:
    """The locks of a file, by byte numbers, which need not exist in the file. Raises RunBusy where this process has it."""

    def __init__(self, path: Path):
        self._path = path.resolve()
        if self._path in _open:
            raise RunBusy(f"{path.parent}: this process has that run open already")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _open.add(self._path)

    def close(self) -> None:
        """Lets go of everything."""
        _open.discard(self._path)
        os.close(self._file)

    def is_there(self) -> bool:
        """Whether the path still leads to this file: another process can have removed it."""
        try:
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:  # it is not there, or of a folder that a file server has removed
            return False

    def take(self, first: int, length: int = 1, wait: bool = False) -> bool:
        """Locks bytes that no other process has locked. With `wait` it comes back when it has them. Raises UserError."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), length, first)
            return True
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise UserError(f"paths.outputs: cannot lock {self._path}: {error.strerror}; allowed: a file system with POSIX "
                            "record locks, such as a local one, NFS 4, or Lustre mounted with flock") from error

    def free(self, first: int, length: int = 1) -> None:
        """Lets go of bytes, whether or not they are locked."""
        if length:  # fcntl takes 0 for all that follow
            fcntl.lockf(self._file, fcntl.LOCK_UN, length, first)

    def number(self) -> int:
        """The number in the file, 0 at first. Behind a lock that was just taken it is the server's, not a client's cache's.

        Raises UserError where it is none.
        """
        content = os.pread(self._file, _DIGITS, 0)
        if content and not content.isdigit():
            raise UserError(f"{self._path}: given {content!r}; allowed: a number; delete it while no process draws the run")
        return int(content or 0)

    def set_number(self, number: int) -> None:
        """Replaces the number, in one call, so that nobody ever reads a part. With a lock that all writers take.

        Raises UserError.
        """
        with writing(self._path):
            os.pwrite(self._file, b"%0*d" % (_DIGITS, number), 0)
            os.fsync(self._file)
