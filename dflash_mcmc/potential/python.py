"""A function of the user, in a process of its own with limits of time and memory."""

import runpy
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mcmc.components import MISSING, Settings, identity, register, runtime
from dflash_mcmc.errors import UserError
from dflash_mcmc.potential import Evaluator, Factor
from dflash_mcmc.process import functions, worker
from dflash_mcmc.types import Problem


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
        functions.function_at("potential.path", self.path)

    def fingerprint(self) -> str:
        """A hash of the file and of the function's name."""
        return functions.fingerprint("potential.path", self.path)

    def start(self, config: Settings) -> Evaluator:
        process = _RatingProcess(*functions.place_of("potential.path", self.path), self.timeout_seconds, self.memory_gib)
        return Evaluator(process.rate, self.on_failure, close=process.end)


class _RatingProcess:
    """A process that calls the function. It is begun again after a call that took too long or ended it."""

    def __init__(self, file: Path, function: str, seconds: float, memory_gib: float):
        self._start, self._seconds, self._lock = (_begin, str(file), function, memory_gib), seconds, threading.Lock()
        self._worker: worker.WorkerProcess | None = None

    def rate(self, problem: Problem, text: str) -> float:
        """What the function returns. Raises an Exception where it fails."""
        asked = {name: problem._asdict()[name] for name in ("id", "question", "answer", "level", "subject")}
        with self._lock:
            if self._worker is None or not self._worker.process.is_alive():
                self._worker = worker.WorkerProcess(*self._start)
            try:
                return self._worker.call(self._seconds, _rate, asked, text)
            except worker.NotStarted as error:
                raise UserError(f"potential.path: {self._start[1]} does not start") from error

    def end(self) -> None:
        """Ends the process."""
        if self._worker is not None:
            self._worker.end()


_function: Any = None
"""The function of the user, in its process."""


def _begin(file: str, function: str, memory_gib: float) -> None:
    global _function
    _function = runpy.run_path(file)[function]
    worker.limit_memory(memory_gib)


def _rate(problem: dict[str, Any], text: str) -> float:
    """What the function returns. Raises ValueError for what is no number, and what the function raises, by its name alone."""
    try:
        value = _function(problem, text)
    except Exception as error:  # its class may be one that only this process knows
        raise ValueError(type(error).__name__) from None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(type(value).__name__)
    return float(value)
