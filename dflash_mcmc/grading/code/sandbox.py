"""The sandbox: runs a model's program in a fresh interpreter, isolated by the walls that this machine supports.

Whether a wall works is tested, not assumed: programs of our own try to get through each wall before a model's program runs.
"""

import contextlib
import json
import os
import pickle
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

WALLS = ("user", "limits", "network", "processes", "files")
"""What each wall guarantees:

- user: the program is not root and cannot become root, not even in a new namespace;
- limits: memory, time, file sizes and the number of processes are limited;
- network: there is no network;
- processes: the program sees only its own processes, and none of them outlives it;
- files: the only files are the system's libraries, the interpreter and an empty writable folder.
"""
_ATTEMPTS = (WALLS, ("user", "limits", "network", "processes"), ("user", "limits"))
_INSIDE = Path(__file__).parent / "inside"
"""Scripts that run in separate processes of the sandbox. They import nothing from this project, and nothing imports them."""
_MAX_REPORT = 256
"""The largest number of bytes that are read from a report."""
_MEBIBYTE = 1 << 20
_START_SECONDS = 30
_END_SECONDS = 10
"""The largest wait for the end of a program's processes after its time limit."""
_MAX_PROCESSES = 8
"""The largest number of processes of one program. Each of them may use the full memory limit."""


class CannotRun(Exception):
    """The walls could not be set up, and the program was not run. The message is the reason."""


class Limits(NamedTuple):
    """Limits of a program: `seconds` of wall clock, and `memory_gib` GiB of address space for each of its processes.

    `programs` is the number of programs that run at the same time. If the programs cannot run as different users, the kernel
    counts their processes together. The limit on processes is then multiplied by `programs`.
    """

    seconds: float
    memory_gib: float
    programs: int = 1


class Ended(NamedTuple):
    """How a program ended."""

    passed: bool
    word: str
    """tests (passed), timeout, syntax_error, missing_definition, failed_test, raised, exited (called exit early), killed, or
    lost (something else killed the launcher, so that nothing is known of the program)."""
    detail: str = ""
    """Name of the exception or signal, or the exit code."""


class Sandbox(NamedTuple):
    """An interpreter, the folder `base` that contains it, and the walls to set up around it."""

    python: str
    base: str
    attempted: tuple[str, ...]

    def run(self, program: str, entry_point: str, limits: Limits, tests: str = "", stop: int | None = None) -> Ended:
        """Runs a program and its tests until they end or exceed a limit, or the descriptor `stop` can be read.

        Raises CannotRun if the walls cannot be set up.
        """
        nonce, launcher = secrets.token_hex(16), secrets.token_hex(16)
        reading, writing = os.pipe()
        try:
            with open(os.memfd_create("program"), "w+b") as stdin:
                pickle.dump((nonce, program, tests), stdin, 4)
                stdin.seek(0)
                seconds = int(limits.seconds) + 2
                settings = {
                    "walls": self.attempted, "python": self.python, "base": self.base, "verdict": writing, "name": launcher,
                    "runner": (_INSIDE / "runner.py").read_text(), "arguments": [str(writing), entry_point],
                    "scratch_bytes": 16 * _MEBIBYTE, "parent": os.getpid(), "programs": limits.programs,
                    "limits": {"AS": int(limits.memory_gib * 1024) * _MEBIBYTE, "CPU": seconds, "FSIZE": _MEBIBYTE,
                               "NOFILE": 64, "NPROC": _MAX_PROCESSES, "CORE": 0}}
                command = [sys.executable, "-I", "-S", "-B", str(_INSIDE / "launch.py"), json.dumps(settings)]
                process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={},
                                           cwd="/", start_new_session=True, pass_fds=[writing])
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        with open(reading, "rb", buffering=0) as verdict:
            timed_out = _finish(process, limits.seconds, "network" in self.attempted, stop)
            # Without waiting for more: a process that escaped could hold the pipe open.
            os.set_blocking(verdict.fileno(), False)
            report = (verdict.read(_MAX_REPORT) or b"").decode("utf-8", "replace")
        if report.startswith(launcher):
            raise CannotRun(report.removeprefix(launcher).strip())
        code = process.returncode
        if timed_out or code == 128 + signal.SIGXCPU:
            return Ended(False, "timeout")
        if code == 0 and secrets.compare_digest(report.encode(), nonce.encode()):
            return Ended(True, "tests")
        if code < 0:  # the launcher itself, which a program in a namespace cannot reach
            return Ended(False, "lost", signal.Signals(-code).name)
        if code - 128 in set(signal.Signals):
            return Ended(False, "killed", signal.Signals(code - 128).name)
        word, _, detail = report.removeprefix("!").partition("!")[0].partition(" ")
        if report.startswith("!") and word in ("syntax_error", "missing_definition", "failed_test", "raised"):
            return Ended(False, word, detail)
        return Ended(False, "exited", f"code {code}")


def find_sandbox() -> tuple[Sandbox, tuple[str, ...]]:
    """The strongest sandbox that this machine supports, and its working walls. Raises CannotRun if no sandbox works."""
    reasons = []
    for attempted in _ATTEMPTS:
        own = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        for python, base in [(own, os.path.realpath(sys.base_prefix)), ("/usr/bin/python3", "/usr")]:
            sandbox = Sandbox(python, base, attempted)
            try:
                if sandbox.run("", "", Limits(_START_SECONDS, 1)).passed:
                    return sandbox, working_walls(sandbox)
            except CannotRun as error:
                reasons.append(str(error))
    raise CannotRun("; ".join(dict.fromkeys(reasons)))


def working_walls(sandbox: Sandbox) -> tuple[str, ...]:
    """The walls of a sandbox that work. A wall works if a test program cannot get through it."""
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        os.chmod(file.name, 0o644)
        tests = {
            "user": "import ctypes, os\nassert os.geteuid() != 0\nlibrary = ctypes.CDLL(None)\n"
                    "assert library.unshare(0x10000000) != 0 and library.syscall(425, 1, 0) < 0\n"
                    "try:\n    os.setuid(0)\nexcept OSError:\n    pass\nelse:\n    assert False",
            "limits": "import ctypes\nassert ctypes.CDLL(None).shmget(0, ctypes.c_size_t(1 << 20), 0o1600) < 0\n"
                      "try:\n    bytearray(3 << 30)\nexcept MemoryError:\n    pass\nelse:\n    assert False",
            "network": "import socket\ntry:\n    socket.create_connection(('127.0.0.1', 9), 1)\n"
                       "except ConnectionRefusedError:\n    assert False\nexcept OSError:\n    pass\nelse:\n    assert False",
            # The first process of its namespace leads the session. The grader itself may be process 1 of a container.
            "processes": "import os\nassert os.getsid(0) == 1",
            "files": f"import os\nassert not os.path.exists({file.name!r})\nopen('own', 'w').write('x')",
        }
        limits = Limits(_START_SECONDS, 1)
        return tuple(wall for wall in WALLS if sandbox.run(tests[wall], "", limits).passed)


def _finish(process: subprocess.Popen, seconds: float, own_namespaces: bool, stop: int | None) -> bool:
    """Waits for the program's end and returns whether it timed out or was stopped. Ends all its processes.

    With namespaces, the launcher ends when no process of the program is left. It is asked first, so that this function returns
    after that. Without them, all processes are in the launcher's group, and the function waits until the group is empty.
    """
    end = os.pidfd_open(process.pid)
    try:
        timed_out = end not in select.select([end] if stop is None else [end, stop], [], [], seconds)[0]
        if timed_out and own_namespaces:
            process.terminate()
            select.select([end], [], [], _END_SECONDS)
        return timed_out
    finally:
        os.close(end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            limit = time.monotonic() + (0 if own_namespaces else _END_SECONDS)
            while time.monotonic() < limit:
                os.killpg(process.pid, 0)
                time.sleep(0.001)
