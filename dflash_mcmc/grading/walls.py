"""Walls around a process that works on an answer: memory, network, environment, and a life that ends with the run's."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

GIBIBYTE = 1 << 30
_PR_SET_PDEATHSIG = 1
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


def limit_memory(gib: float) -> None:
    """Limits the address space of this process, to less where less is allowed already."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = int(gib * GIBIBYTE)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def die_with(parent: int) -> None:
    """Linux: the kernel kills this process when its parent is gone, however it went, also in the midst of a long C call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def leave_network() -> bool:
    """Linux: takes this process off the network, where the kernel allows it. Returns whether it did."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.unshare(_CLONE_NEWNET) == 0 or libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0


def leave_session() -> None:
    """A session of its own, without an environment: no terminal's signals, no tokens."""
    if os.getpid() != os.getsid(0):
        os.setsid()
    os.environ.clear()
