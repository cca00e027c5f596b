"""Ends that are asked for: SIGTERM, SIGUSR1 and SIGUSR2, as SLURM and launchers send them ahead of a kill.

What is under way gets some seconds to be finished and recorded, nothing new is begun, and the rest is given up: the next start
draws it, with the same randomness. Ctrl-C is Python's own KeyboardInterrupt, at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_TERM_SECONDS = 20.0
"""SLURM, and torchrun, kill 30 seconds behind a SIGTERM by default."""
_noted: list[signal.Signals] = []


class Stopped(BaseException):
    """The process was asked to end and has more to do; no Exception, so that nothing takes it for a failure."""


@contextmanager
def heeded(grace_seconds: float) -> Iterator[None]:
    """Inside, a signal is a request. So many seconds behind it Stopped is raised, wherever the program is.

    Outside the main thread, where no handlers can be set, signals do what they did before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        seconds = min(grace_seconds, _TERM_SECONDS) if number == signal.SIGTERM else grace_seconds
        first, left = not _noted, signal.getitimer(signal.ITIMER_REAL)[0]
        _noted.append(signal.Signals(number))  # ahead of the timer, whose handler reads it
        if first or seconds < left:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))

    def expire(number: int, frame: FrameType | None) -> None:
        raise Stopped(_noted[0].name)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, expire)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        _noted.clear()


def requested() -> bool:
    """Whether nothing new is to be begun."""
    return bool(_noted)


def check() -> None:
    """Raises Stopped where an end was asked for."""
    if _noted:
        raise Stopped(_noted[0].name)

