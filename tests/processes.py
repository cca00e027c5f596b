"""Starts programs in separate processes, without the seconds that each would need for its imports.

    done = processes.run(["-m", "dflash_mcmc", "sampler=greedy"], folder)  # as subprocess.run: returncode, stdout, stderr
    with processes.start(["-m", "dflash_mcmc"], folder, WANDB_MODE="offline") as program:  # as subprocess.Popen
        os.kill(program.pid, signal.SIGINT)
        output, errors = program.communicate(timeout=processes.HANG)

A program is forked from a process that has imported torch, transformers and other packages, but nothing of this project
(tests/preloaded.py). Everything else belongs to the program: arguments, folder, environment, output, session (its id is the id
of the process group), exit code, and end of the interpreter. Processes that a program starts are not forked from the preloaded
process. Use subprocess for tests of the imports themselves, or of the memory that they take.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

ROOT = Path(__file__).resolve().parent.parent
HANG = 600
"""Seconds after which a test that waits is taken to hang. They say nothing about the speed of a machine."""
OF_TESTS = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false",
            "WANDB__DISABLE_STATS": "true", "TOKENIZERS_PARALLELISM": "false"}
"""Variables of every test. What starts pytest as a program has them too, since packages have read some of them by then."""
READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "TORCH", "CUDA_", "OMP_", "MKL_", "OPENBLAS_", "MPL", "PYTHON", "LD_")
"""Prefixes of the variables that packages read when they are imported. Only PYTHONPATH may differ in a program."""


class Program:
    """A running program. It writes its output to files, so it never waits for a reader."""

    def __init__(self, arguments: Sequence[str], folder: Path, environment: dict[str, str], contained: bool):
        self.args = [sys.executable, *arguments]
        self.returncode: int | None = None
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  (open as long as this object)
        self._report, reporting = os.pipe()
        with tempfile.TemporaryFile("w+") as request:
            json.dump({"arguments": arguments, "folder": str(folder), "environment": environment, "contained": contained},
                      request)
            request.flush()
            request.seek(0)
            files = [request.fileno(), self._output.fileno(), self._errors.fileno(), reporting]
            socket.send_fds(_preloaded(), [b"1"], files)
            os.close(reporting)
            self.pid = int(self._line())

    def _line(self) -> str:
        text = b""
        while not text.endswith(b"\n"):
            read = os.read(self._report, 1)
            if not read:
                raise RuntimeError("the process that starts programs has ended; its message is on standard error")
            text += read
        return text.decode()

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that ended the program. None while it runs."""
        return self._await(0)

    def _await(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], seconds)[0]:
            self.returncode = int(self._line())
            os.close(self._report)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code. Raises subprocess.TimeoutExpired."""
        if self._await(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end and returns (standard output, standard error). Raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        return self.stdout, self.stderr

    @property
    def stdout(self) -> str:
        """Standard output so far."""
        return _content(self._output)

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return _content(self._errors)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the program and all processes of its session."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_) -> None:
        self.kill()
        self.wait()


def _content(file: BinaryIO) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def wait_until(condition: Callable[[], object], seconds: float = HANG) -> None:
    """Polls until the condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not true after {seconds} s"
        time.sleep(0.02)


def start(arguments: Sequence[str], folder: Path, contained: bool = False, **environment: str | None) -> Program:
    """Starts `python *arguments` in a folder and in a new session. The arguments begin with `-m module`, `-c code` or a file.

    Args:
        contained: whether the program's end is the end of every process that it has started, in whatever session or group.
            The program has not ended before they have.
        environment: added to this process's variables. The value None removes a variable.
    """
    # Programs do not share the service that W&B starts in this process, nor what PyTorch sets when its compiler is imported.
    given = {**os.environ, "WANDB_SERVICE": None, "TORCHINDUCTOR_CACHE_DIR": None, **environment}
    if environment.get("PYTHONPATH"):  # this checkout comes after the given folders and before the installed packages
        given["PYTHONPATH"] = f"{environment['PYTHONPATH']}{os.pathsep}{ROOT}"
    given = {name: value for name, value in given.items() if value is not None and not name.startswith("PYTEST_")}
    _check(given)
    return Program([str(argument) for argument in arguments], Path(folder).resolve(), given, contained)


def run(arguments: Sequence[str], folder: Path, timeout: float = HANG,
        **environment: str | None) -> subprocess.CompletedProcess:
    """Runs `python *arguments` to its end; see `start` and `result_of`."""
    with start(arguments, folder, **environment) as program:
        return result_of(program, timeout)


def result_of(program: Program | subprocess.Popen, timeout: float = HANG) -> subprocess.CompletedProcess:
    """Waits for the end of a program. Raises subprocess.TimeoutExpired for one that hangs.

    A program hangs if it has hardly computed in the last `timeout` seconds. On a busy machine it may take any time.
    """
    used = 0.0
    while True:
        try:
            output, errors = program.communicate(timeout)
            return subprocess.CompletedProcess(program.args, program.returncode, output, errors)
        except subprocess.TimeoutExpired:
            before, used = used, _computed(program.pid)
            if used < before + timeout / 100:
                raise


def _computed(pid: int) -> float:
    """Seconds of a processor that a process and those that it has started have used; 0 if it has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        program = psutil.Process(pid)
        times = program.cpu_times()
        return sum(times[:4]) + sum(sum(child.cpu_times()[:2]) for child in program.children(recursive=True))
    return 0.0


def start_ranks(count: int, arguments: Sequence[str], folder: Path, **environment: str | None) -> list[Program]:
    """Starts the same command `count` times, with the variables that `accelerate launch` sets for its processes."""
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [start(arguments, folder, RANK=str(rank), LOCAL_RANK=str(rank), **sizes, **environment) for rank in range(count)]


def _check(given: dict[str, str]) -> None:
    base = _environment()
    names = [name for name in given.keys() | base.keys()
             if name.startswith(READ_AT_IMPORT) and name != "PYTHONPATH" and given.get(name, base.get(name)) != base.get(name)]
    if names:
        raise ValueError(f"{', '.join(sorted(names))}: read when packages are imported, which has happened: use subprocess")


@functools.cache
def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}  # with more, threads would start in the process that forks


@functools.cache
def _preloaded() -> socket.socket:
    """The socket of the process that forks. That process ends with this one."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, Path(__file__).with_name("preloaded.py"), str(theirs.fileno())],
                               pass_fds=[theirs.fileno()], env=_environment(), stdin=subprocess.DEVNULL)
    theirs.close()
    atexit.register(_end, ours, process)
    return ours


def _end(ours: socket.socket, process: subprocess.Popen) -> None:
    ours.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
