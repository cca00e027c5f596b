"""The files that vLLM's processes share: a folder for temporary ones, and segments of shared memory on a CPU.

vLLM names both after a file that it makes where `tempfile` puts temporary files, and leaves them behind when its processes are
killed; the segments also when they end. The folder is therefore this package's own, and locked while the process or one of its
workers lives. Folders that nobody locks are removed with their segments by the next start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "dflash_mcmc-vllm-"
_LOCK = "lock"
_STORE = "vllm_dist_"
"""vLLM's prefix of the file by which workers meet. Segments have its name and a suffix."""
SEGMENTS = Path("/dev/shm")


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
    for store in folder.glob(f"{_STORE}*"):
        for segment in SEGMENTS.glob(f"{store.name}-*"):
            segment.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # another process may remove it at the same time
