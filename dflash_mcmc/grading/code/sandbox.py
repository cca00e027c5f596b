"""Running a program that a model has written: in a fresh interpreter, behind the walls that this machine allows.

What stands is measured, not assumed: each wall is tried by a program of our own before the first program of a model is run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, NamedTuple

WALLS = ("user", "limits", "network", "processes", "files")
"""user: not root, and can never be, in a namespace of its own either; limits: of memory, time, files and processes; network:
none; processes: none but its own are seen, and none outlives it; files: none but the system's libraries and the interpreter
are there, and an empty folder."""
_ATTEMPTS = (WALLS, ("user", "limits", "network", "processes"), ("user", "limits"))
_INSIDE = Path(__file__).parent / "inside"
_MOST_SAID = 256
_MIBIBYTE = 1 << 20
_START_SECONDS = 30
_MOST_PROCESSES = 8
"""Of a program: each of them may take the memory that is allowed."""


class CannotRun(Exception):
    """The walls could not be put up, and nothing was run. The message says why."""


class Limits(NamedTuple):
    """What a program may use. `seconds` of wall clock, `memory_gib` of address space, of each of its processes.

    `programs` run at a time: where they cannot be different users, the processes that each is allowed are theirs together.
    """

    seconds: float
    memory_gib: float
    programs: int = 1


class Ended(NamedTuple):
    """How a program ended."""

    passed: bool
    word: str
    """timeout, syntax_error, missing_definition, failed_test, raised, exited (by itself, before its end) or killed."""
    detail: str = ""
    """The exception, or the signal."""


class Sandbox(NamedTuple):
    """An interpreter and the walls that are put up around it."""

    python: str
    base: str
    attempted: tuple[str, ...]

    def run(self, program: str, entry_point: str, limits: Limits) -> Ended:
        """Runs a program to its end. Raises CannotRun."""
        nonce, launcher = secrets.token_hex(16), secrets.token_hex(16)
        reading, writing = os.pipe()
        try:
            with open(os.memfd_create("program"), "w+b") as given:
                given.write(f"{nonce}\n{program}".encode("utf-8", "surrogatepass"))
                given.seek(0)
                process = self._start(given, writing, launcher, entry_point, limits)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        with open(reading, "rb", buffering=0) as verdict:
            timed_out = _finish(process, limits.seconds)
            said = _read(verdict)
        if said.startswith(launcher):
            raise CannotRun(said.removeprefix(launcher).strip())
        return _ended(process.returncode, said, nonce, timed_out)

    def _start(self, given: IO, verdict: int, launcher: str, entry_point: str, limits: Limits) -> subprocess.Popen:
        seconds = int(limits.seconds) + 2
        settings = {
            "walls": self.attempted, "python": self.python, "base": self.base, "verdict": verdict, "name": launcher,
            "runner": (_INSIDE / "runner.py").read_text(), "arguments": [str(verdict), entry_point],
            "scratch_bytes": 16 * _MIBIBYTE,
            "limits": {"AS": int(limits.memory_gib * 1024) * _MIBIBYTE, "CPU": seconds, "FSIZE": _MIBIBYTE, "NOFILE": 64,
                       "NPROC": _MOST_PROCESSES, "CORE": 0},
            "programs": limits.programs,
        }
        command = [sys.executable, "-I", "-S", "-B", str(_INSIDE / "launch.py"), json.dumps(settings)]
        return subprocess.Popen(command, stdin=given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={},
                                cwd="/", start_new_session=True, pass_fds=[verdict])


def find_sandbox() -> tuple[Sandbox, tuple[str, ...]]:
    """The strongest sandbox that works here, and the walls that stand around it. Raises CannotRun where none works."""
    reasons = []
    for attempted in _ATTEMPTS:
        for python, base in _interpreters():
            sandbox = Sandbox(python, base, attempted)
            try:
                if sandbox.run("", "", Limits(_START_SECONDS, 1)).passed:
                    return sandbox, standing(sandbox)
            except CannotRun as error:
                reasons.append(str(error))
    raise CannotRun("; ".join(dict.fromkeys(reasons)))


def standing(sandbox: Sandbox) -> tuple[str, ...]:
    """The walls that a program of our own could not get through."""
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        os.chmod(file.name, 0o644)
        tests = {
            "user": "import ctypes, os\nassert os.geteuid() != 0\nassert ctypes.CDLL(None).unshare(0x10000000) != 0\n"
                    "try:\n    os.setuid(0)\nexcept OSError:\n    pass\nelse:\n    assert False",
            "limits": "import ctypes\nassert ctypes.CDLL(None).shmget(0, ctypes.c_size_t(1 << 20), 0o1600) < 0\n"
                      "try:\n    bytearray(3 << 30)\nexcept MemoryError:\n    pass\nelse:\n    assert False",
            "network": "import socket\nassert [name for _, name in socket.if_nameindex()] == ['lo']\n"
                       "try:\n    socket.create_connection(('127.0.0.1', 9), 1)\n"
                       "except ConnectionRefusedError:\n    assert False\nexcept OSError:\n    pass\nelse:\n    assert False",
            "processes": f"import os\ntry:\n    os.kill({os.getpid()}, 0)\nexcept ProcessLookupError:\n    pass\n"
                         "else:\n    assert False",
            "files": f"import os\nassert not os.path.exists({file.name!r})\nopen('own', 'w').write('x')",
        }
        limits = Limits(_START_SECONDS, 1)
        return tuple(wall for wall in WALLS if sandbox.run(tests[wall], "", limits).passed)


def _interpreters() -> list[tuple[str, str]]:
    """(interpreter, folder that it lies in): the one that runs this, without its virtual environment, and the system's."""
    own = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    return [(own, os.path.realpath(sys.base_prefix)), ("/usr/bin/python3", "/usr")]


def _finish(process: subprocess.Popen, seconds: float) -> bool:
    """Waits for the program's end; returns whether the time was up. Nothing of its session is left."""
    end = os.pidfd_open(process.pid)
    try:
        return not select.select([end], [], [], seconds)[0]
    finally:
        os.close(end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(verdict: IO) -> str:
    """What was said. A process that is left could hold the pipe open: what is there is all that counts."""
    os.set_blocking(verdict.fileno(), False)
    return (verdict.read(_MOST_SAID) or b"").decode("utf-8", "replace")


def _ended(code: int, said: str, nonce: str, timed_out: bool) -> Ended:
    if timed_out or code == 128 + signal.SIGXCPU:
        return Ended(False, "timeout")
    if code == 0 and secrets.compare_digest(said.encode(), nonce.encode()):
        return Ended(True, "tests")
    if code - 128 in set(signal.Signals) or code < 0:
        return Ended(False, "killed", signal.Signals(code - 128 if code > 0 else -code).name)
    word, _, detail = said.removeprefix("!").partition("!")[0].partition(" ")
    if said.startswith("!") and word in ("syntax_error", "missing_definition", "failed_test", "raised"):
        return Ended(False, word, detail)
    return Ended(False, "exited", f"code {code}")
