"""The process from which tests/processes.py starts programs. It imports the packages that this project uses, but no module of
the project itself, and forks once for each requested program.

It is started by `python preloaded.py FD`, where FD is a socket. A request consists of four file descriptors: a file with the
program as JSON, its standard output, its standard error, and a pipe. The process id of the program is written to the pipe, and
at its end the exit code.
"""

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import signal
import socket
import sys
import types
from pathlib import Path

PACKAGES = ("torch._dynamo", "transformers.models.qwen3.modeling_qwen3", "accelerate", "scipy.stats", "sympy", "math_verify",
            "matplotlib.pyplot", "hydra.main", "hydra.initialize", "omegaconf", "jinja2", "tabulate",
            "tqdm.auto", "yaml", "psutil", "pydantic.main")
"""Packages that can be imported before a fork. pandas, and the packages that import it (arviz, datasets), start a
thread when they are imported, and wandb stores the process id."""
_PR_SET_CHILD_SUBREAPER = 36


def main(given: int) -> None:
    """Serves requests until the socket is closed. It returns in a forked process, prepared to run the requested program."""
    for name in PACKAGES:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("a process with threads cannot be forked: one of the packages has started threads")
    assert "dflash_mcmc" not in sys.modules
    gc.freeze()  # garbage collection would write to memory pages that the programs share, and so copy them
    with socket.socket(fileno=given) as requests:
        while True:
            descriptors = _received(requests)
            if not descriptors:
                sys.exit()
            if os.fork() == 0:
                break
            for descriptor in descriptors:
                os.close(descriptor)
            _reap()
    program, output, errors, report = descriptors
    with open(program) as file:
        given = json.load(file)
    _supervise(report, given.pop("contained"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    _become(**given)
    atexit.register(gc.unfreeze)  # nanobind takes what is frozen at an exit for a leak, and says so
    for descriptor in (output, errors):
        os.close(descriptor)


def _received(requests: socket.socket) -> list[int]:
    """The file descriptors of a request. The list is empty if the socket was closed."""
    descriptors = array.array("i")
    _, ancillary, _, _ = requests.recvmsg(1, socket.CMSG_SPACE(4 * descriptors.itemsize))
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    return list(descriptors)


def _reap() -> bool:
    """Waits for children that have ended, so that their time counts as that of this process's children. Whether others run."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _supervise(report: int, contained: bool) -> None:
    """Forks. The parent reports the child's process id and exit code, and then exits. The function returns in the child.

    Args:
        contained: whether the parent ends all that the child has started before it reports the child's end.
    """
    if contained and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    child = os.fork()
    if child:
        os.write(report, f"{child}\n".encode())
        process = status = 0
        while process != child:  # others are orphans of a contained program
            process, status = os.waitpid(-1, 0)
        if contained:
            _end_descendants()
        os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.close(report)
    os.setsid()


def _end_descendants() -> None:
    """Kills all descendants of this process until there is none. It is the parent of those whose own parent has ended.

    Each is stopped before any is killed, so that fewer fork on. One that was forked meanwhile is found in the next turn.
    """
    while True:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in _descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
        if not _reap():
            return


def _descendants(process: int) -> list[int]:
    """The descendants of a process, children before their own children."""
    try:
        tasks = [f"/proc/{process}/task/{task}/children" for task in os.listdir(f"/proc/{process}/task")]
        children = [int(child) for task in tasks for child in Path(task).read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return []
    return [*children, *(found for child in children for found in _descendants(child))]


def _become(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Sets up the process as a new interpreter does before it runs the first line of a program."""
    own = set(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    first = {"-m": folder, "-c": ""}.get(arguments[0], str(Path(arguments[0]).resolve().parent))
    added = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *added, *(entry for entry in sys.path[1:] if entry not in own)]
    importlib.invalidate_caches()
    multiprocessing.process.ORIGINAL_DIR = folder
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = [arguments[0], *arguments[2:]] if arguments[0] in ("-m", "-c") else arguments


def run(kind: str, what: str) -> None:
    """Runs the program as `python -m what`, `python -c what` or `python kind` would."""
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.modules["__main__"] = program = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), program.__dict__)
    else:
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]))
    run(*[*sys.orig_argv[1:], ""][:2])
