"""Restrictions ("walls") of a grading process: limited memory, no network, no environment, no life after the run's end."""

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
    """Limits the address space of this process to `gib` GiB, or to the hard limit if that is lower."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = int(gib * GIBIBYTE)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def die_with(parent: int) -> None:
    """On Linux, makes the kernel kill this process when its parent ends for any reason, even during a long C call.

    `parent` is the parent's process id; if it has already ended, this process exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def leave_network() -> bool:
    """On Linux, moves this process to a network namespace without connections. Returns whether the kernel allowed it."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.unshare(_CLONE_NEWNET) == 0 or libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0


def leave_session() -> None:
    """Moves this process to a new session, away from the terminal's signals, and clears its environment.

    The environment may contain access tokens.
    """
    if os.getpid() != os.getsid(0):
        os.setsid()
    os.environ.clear()
