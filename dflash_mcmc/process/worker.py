"""A worker: a process of its own that answers calls, so that no call can hold or end the run."""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_START_SECONDS = 120
_PR_SET_PDEATHSIG, _CLONE_NEWUSER, _CLONE_NEWNET = 1, 0x10000000, 0x40000000


class Died(Exception):
    """A worker has ended during a call. The argument is its exit code, negative for a signal."""


class NotStarted(Died):
    """A worker was killed since it did not start in time."""


class WorkerProcess:
    """A process and the pipe to it. The process begins with a call of `start`, and takes no calls before that has ended."""

    def __init__(self, start: Callable[..., None], *arguments: object):
        context = multiprocessing.get_context("spawn")
        self._pipe, other_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(other_end, start, arguments), daemon=True)
        # It inherits a blocked SIGINT: Ctrl-C must reach only the run, which ends its workers itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self.process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other_end.close()
        self._started = False

    def call(self, seconds: float, function: Callable, *arguments: object) -> Any:
        """The result of a function in the process. A process that is late is killed; its start has limits of its own.

        Raises Died, TimeoutError, or what the function raises.
        """
        if not self._started:
            try:
                self._reply(_START_SECONDS)
            except TimeoutError as error:
                raise NotStarted(self.process.exitcode) from error
            self._started = True
        with contextlib.suppress(ConnectionError):  # it has ended: there is no reply
            self._pipe.send((function, *arguments))
        return self._reply(seconds)

    def _reply(self, seconds: float) -> Any:
        late = False
        with contextlib.suppress(EOFError, ConnectionError):
            if self._pipe.poll(seconds):
                value, error = self._pipe.recv()
                if error is not None:
                    raise error
                return value
            late = True
        self.end()
        raise TimeoutError(f"no reply in {seconds:g} s") if late else Died(self.process.exitcode)

    def end(self) -> None:
        """Kills the process and waits for its end."""
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, start: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """The main function of a worker: starts, says so, and then replies to each call with (result, exception)."""
    start(*arguments)
    pipe.send((None, None))
    with contextlib.suppress(EOFError):  # the run has closed its end
        while True:
            function, *arguments = pipe.recv()
            try:
                pipe.send((function(*arguments), None))
            except Exception as error:
                pipe.send((None, error))


def limit_memory(gib: float) -> None:
    """Limits the address space of this process on Linux. macOS refuses such limits (python/cpython 78783)."""
    if sys.platform == "linux":
        hard, limit = resource.getrlimit(resource.RLIMIT_AS)[1], int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def confine(memory_gib: float, parent: int) -> None:
    """Restricts this process: no environment, which may contain access tokens, and no signals of the terminal.

    On Linux its memory is limited, it has no network if the kernel allows that, and the kernel kills it when the process
    `parent` ends for any reason, even during a long C call.
    """
    limit_memory(memory_gib)
    if sys.platform == "linux":
        die_with_parent()
        libc = ctypes.CDLL(None)
        if os.getppid() != parent:  # it has already ended
            os._exit(1)
        if libc.unshare(_CLONE_NEWNET):
            libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    if os.getpid() != os.getsid(0):
        os.setsid()
    os.environ.clear()
