"""The files that vLLM's processes share: a folder for temporary ones, and segments of shared memory on a CPU.

vLLM names both after a file that it makes where `tempfile` puts temporary files, and leaves them behind when its processes are
killed; the segments also when they end. The folder is therefore this package's own, and locked while the process or one of its
workers lives. Folders that nobody locks are removed with their segments by the next start. The last worker that ends may
remove the file itself, so that its name is noted in a file of this package.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_mcmc.errors import UserError

_PREFIX = "dflash_mcmc-vllm-"
_LOCK = "lock"
_STORE = "vllm_dist_"
"""vLLM's prefix of the file by which workers meet. Segments have its name and a suffix."""
_NOTE = "note-"
SEGMENTS = Path("/dev/shm")
_LONGEST_SOCKET, _SOCKET = 107, 37
"""Bytes of the path of a socket on Linux, and of the part that vLLM adds to a folder for one between workers."""


class Scratch:
    """A folder of this process, in the folder of temporary files."""

    def __init__(self) -> None:
        remove_stale()
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        new = self.folder / "new"  # it has its name once it is locked, so that no other start takes it for a stale one
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.folder / _LOCK)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Lets `tempfile` use the folder inside the context."""
        before, tempfile.tempdir = tempfile.tempdir, str(self.folder)
        try:
            yield
        finally:
            tempfile.tempdir = before
            for store in self.folder.glob(f"{_STORE}*"):
                (self.folder / f"{_NOTE}{store.name}").touch()

    def check_sockets(self) -> None:
        """Raises UserError where the path of a socket between workers would be too long."""
        outer = self.folder.parent
        most = _LONGEST_SOCKET - _SOCKET - len(os.fsencode(self.folder.name)) - 1
        if len(os.fsencode(outer)) > most:
            raise UserError(f"TMPDIR: given {str(outer)!r}; allowed: a folder whose path has at most {most} bytes, with "
                            "several workers of engine=vllm, since Linux limits the paths of sockets")

    def remove(self) -> None:
        """Removes the folder and the segments. The processes that used them have ended."""
        _remove(self.folder)
        os.close(self._lock)


def remove_stale() -> None:
    """Removes the folders of this user whose processes have all ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:  # another user's, removed meanwhile, or not locked yet
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    """Removes a folder and the segments that are named after its files."""
    for noted in [*folder.glob(f"{_STORE}*"), *folder.glob(f"{_NOTE}{_STORE}*")]:
        for segment in SEGMENTS.glob(f"{noted.name.removeprefix(_NOTE)}-*"):
            segment.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # another process may remove it at the same time
