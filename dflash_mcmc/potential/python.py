"""A function of the user, in a process of its own with limits of time and memory."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import resource
import runpy
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dflash_mcmc.errors import UserError
from dflash_mcmc.fields import MISSING, identity, runtime
from dflash_mcmc.potential import Evaluator, Factor
from dflash_mcmc.process.functions import fingerprint, function_at, place_of
from dflash_mcmc.registry import register
from dflash_mcmc.settings import Settings
from dflash_mcmc.types import Problem

_START_SECONDS = 60


@register("potential", "python")
@dataclass(slots=True, kw_only=True)
class PythonPotential(Factor):
    """r is what a function of the user returns: function(problem, text), problem a dictionary, text the answer.

    The file is the user's own code and runs with the user's rights, in a process with limits of time and memory.
    """

    path: str | None = runtime(MISSING, "FILE:FUNCTION; the content of the file is part of the identity")
    timeout_seconds: float = identity(10.0, "wall-clock limit of a call; r of a call that takes longer is on_failure", gt=0)
    memory_gib: float = identity(2.0, "address space of the process, in GiB", ge=0.125, le=1024)

    def check(self, config: Settings) -> None:
        """Raises ConfigError if the file does not define the function, in addition to the checks of every potential."""
        super().check(config)
        function_at("potential.path", self.path)

    def fingerprint(self) -> str:
        """A hash of the file and of the function's name."""
        return fingerprint("potential.path", self.path)

    def start(self, config: Settings) -> Evaluator:
        worker = _RatingProcess(*place_of("potential.path", self.path), self.timeout_seconds, self.memory_gib)
        return Evaluator(worker.rate, self.on_failure, close=worker.end)


class _RatingProcess:
    """A process that calls the function. It is begun again after a call that took too long or ended it."""

    def __init__(self, file: Path, function: str, seconds: float, memory_gib: float):
        self._arguments = (str(file), function, memory_gib)
        self._seconds, self._lock = seconds, threading.Lock()
        self._process: Any = None
        self._pipe: Connection

    def rate(self, problem: Problem, text: str) -> float:
        """What the function returns. Raises TimeoutError, EOFError, OSError or ValueError where it fails."""
        with self._lock:
            if self._process is None or not self._process.is_alive():
                context = multiprocessing.get_context("spawn")
                self._pipe, theirs = context.Pipe()
                self._process = context.Process(target=_serve, args=(theirs, *self._arguments), daemon=True)
                self._process.start()
                theirs.close()
                if not self._pipe.poll(_START_SECONDS):
                    raise UserError(f"potential.path: {self._arguments[0]} does not start within {_START_SECONDS} seconds")
                self._pipe.recv_bytes()
            asked = {name: problem._asdict()[name] for name in ("id", "question", "answer", "level", "subject")}
            self._pipe.send_bytes(json.dumps([asked, text]).encode())
            if not self._pipe.poll(self._seconds):
                self.end()
                raise TimeoutError
            value = json.loads(self._pipe.recv_bytes())
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(value)
        return value

    def end(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def _serve(pipe: Connection, file: str, function: str, memory_gib: float) -> None:
    """Answers calls until the pipe closes; null for a call that raises or returns no number."""
    call = runpy.run_path(file)[function]
    limit = int(memory_gib * 2**30)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    pipe.send_bytes(b"0")
    with contextlib.suppress(EOFError):
        while True:
            try:
                answer = json.dumps(call(*json.loads(pipe.recv_bytes())))
            except EOFError:
                raise
            except Exception:
                answer = "null"
            pipe.send_bytes(answer.encode())
