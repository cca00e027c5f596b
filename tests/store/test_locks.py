"""Locks and threads on other systems than Linux."""

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import closing

import pytest
import torch

import dflash_mcmc as dm
from dflash_mcmc.errors import UserError
from dflash_mcmc.process import ranks
from dflash_mcmc.store.folder import MUTEX, FolderLocks


def test_threads_are_shared_where_no_affinity_is_known(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(ranks, "local_world_size", lambda: 2)
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    assert dm.Local(device="cpu").resolve() == "cpu"
    assert given == [3]


def test_windows_is_one_line_that_says_wsl():
    code = "import os; os.name = 'nt'\ntry:\n    import dflash_mcmc\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "dflash_mcmc needs Linux or macOS; on Windows it runs in WSL: wsl --install\n"


def test_a_lock_that_cannot_be_released_is_one_line(tmp_path, monkeypatch):
    def gone(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with closing(FolderLocks(tmp_path)) as locks:
        monkeypatch.setattr(fcntl, "lockf", gone)
        with pytest.raises(UserError, match=r"^paths\.outputs: cannot unlock .*: No locks available; allowed: "):
            locks.free(MUTEX)


# A stand-in for macOS, whose kernel refuses every limit of the address space (python/cpython 78783): nothing asks for one.

AS_ON_MACOS = """
import resource
from dflash_mcmc.process.worker import confine
limit = resource.setrlimit
def refusing(kind, values):
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    limit(kind, values)
resource.setrlimit = refusing
"""


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_worker_starts(platform):
    program = f"{AS_ON_MACOS}import sys\nsys.platform = {platform!r}\nconfine(2.0, 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode == 0) == (platform == "darwin"), done.stderr
    assert ("current limit exceeds maximum limit" in done.stderr) == (platform == "linux")
