"""Locks on other systems than Linux, and the question whether a run is open."""

from __future__ import annotations

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
from dflash_mcmc.store.locks import FolderLocks, is_open

ASKS = "import sys, pathlib; from dflash_mcmc.store.locks import is_open\n"
ONCE = ASKS + "print(is_open(pathlib.Path(sys.argv[1])))"
FOR_LONG = ASKS + "while True: print(is_open(pathlib.Path(sys.argv[1])), flush=True)"


def asked(folder, before: str = "") -> str:
    done = subprocess.run([sys.executable, "-c", before + ONCE, str(folder)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_run_is_open_while_a_process_has_entered_it(tmp_path):
    assert asked(tmp_path) == "False"
    with closing(FolderLocks(tmp_path)) as locks:
        assert asked(tmp_path) == "True", "a process holds the mutex"
        locks.enter()
        locks.free_mutex()
        assert asked(tmp_path) == "True"
    assert asked(tmp_path) == "False"
    assert not is_open(tmp_path)


def test_no_layout_of_the_system_is_assumed(tmp_path):
    """A stand-in for macOS, whose struct flock has another order."""
    other = "import fcntl, sys; del fcntl.F_GETLK; sys.platform = 'darwin'; fcntl.fcntl = None\n"
    with closing(FolderLocks(tmp_path)) as locks:
        locks.enter()
        locks.free_mutex()
        assert asked(tmp_path, other) == "True"
    assert asked(tmp_path, other) == "False"
    assert fcntl.F_GETLK


def test_a_question_keeps_nobody_from_entering(tmp_path):
    with subprocess.Popen([sys.executable, "-c", FOR_LONG, str(tmp_path)], stdout=subprocess.PIPE, text=True) as asking:
        try:
            assert asking.stdout is not None
            asking.stdout.readline()
            numbers = set()
            for _ in range(300):
                with closing(FolderLocks(tmp_path)) as locks:
                    numbers.add(locks.enter())
                    alone = locks.is_alone()
                    locks.free_mutex()
                assert alone
            assert numbers == {0}
        finally:
            asking.kill()


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
            locks.free_mutex()
