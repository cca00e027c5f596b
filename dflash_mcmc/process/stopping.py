"""Requested stops: SIGTERM, SIGUSR1 and SIGUSR2, which SLURM and launchers send before they kill a process.

Started samples have some seconds to finish and to be recorded. No new sample is started. The next start draws the rest, with
the same randomness. Ctrl-C raises Python's own KeyboardInterrupt at once.
"""

import signal
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_TERM_SECONDS = 20.0
"""Longest grace time after a SIGTERM: by default SLURM and torchrun kill the process 30 seconds after it."""
_WAKES_SECONDS = 1.0
_noted: list[signal.Signals] = []


class Stopped(BaseException):
    """The process was asked to end and has more to do. It is no Exception, so that no handler of failures catches it."""


@contextmanager
def handling_signals(grace_seconds: float) -> Iterator[None]:
    """Inside the context a signal only requests a stop.

    `Stopped` is raised `grace_seconds` after the first signal, anywhere in the program.

    Outside the main thread no handlers can be set, and signals keep their meaning.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(signum: int, frame: FrameType | None) -> None:
        seconds = min(grace_seconds, _TERM_SECONDS) if signum == signal.SIGTERM else grace_seconds
        first, left = not _noted, signal.getitimer(signal.ITIMER_REAL)[0]
        _noted.append(signal.Signals(signum))  # before the timer starts: its handler reads this list
        if first or seconds < left:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))

    def expire(signum: int, frame: FrameType | None) -> None:
        raise Stopped(_noted[0].name)

    before = {signum: signal.signal(signum, note) for signum in SIGNALS}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, expire)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        _noted.clear()


def requested() -> bool:
    """Whether a stop was requested, so that no new sample is started."""
    return bool(_noted)


def wait_for(futures: Collection[Future]) -> None:
    """Waits until one of the futures is done.

    The kernel may give a signal to another thread than the main one, whose handlers then run at the end of its wait. So no
    wait is longer than a second.
    """
    while not wait(futures, _WAKES_SECONDS, FIRST_COMPLETED).done:
        pass


def check() -> None:
    """Raises Stopped if a stop was requested."""
    if _noted:
        raise Stopped(_noted[0].name)

