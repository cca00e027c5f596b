"""Every test leaves the process as it found it: a guard that compares the process before and after each test.

tests/conftest.py imports the two fixtures, which makes them run for every test. A test that changes the process fails in its
teardown with a line for each change.

The function guard is the first fixture of a test to start and the last one to end, so fixtures of wider scope may change the
process for their scope. The module guard compares the process around a module in the same way. It sees what module-scoped
fixtures leave behind. It does not compare threads, because a session-scoped fixture may start some within a module.
"""

import os
import random  # noqa: TID251  (its state is compared here, nothing is drawn from it)
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ALLOWED_VARIABLES = {
    "PYTEST_CURRENT_TEST": "pytest changes it between the phases of a test",
    "TORCHINDUCTOR_CACHE_DIR": "PyTorch sets it when its compiler is imported",
    "WANDB_SERVICE": "W&B keeps its service until the process ends; tests/processes.py removes it for programs",
}
"""Environment variables that are not compared, each with the reason."""
LIBRARY_THREADS = {
    "tqdm_monitor": "tqdm starts one thread for all its progress bars and keeps it",
    "TMonitor": "the same thread in versions of tqdm that do not name it",
    "wandb-": "threads of W&B's service, which ends with the process",
}
"""Beginnings of the names, or classes, of threads that a library starts once and keeps, each with the reason."""
THREAD_SECONDS = 2.0
"""Time for a thread that a test has stopped to end."""
State = dict[str, object]


def _of(package: str, read: Callable[[Any], State]) -> Callable[[], State]:
    """Reads a state from a package if the process has imported it; else nothing, which is compared with nothing."""
    return lambda: read(sys.modules[package]) if package in sys.modules else {}


def _folder() -> State:
    try:
        return {"folder": os.getcwd()}
    except FileNotFoundError:
        return {"folder": None}


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if not thread.name.startswith(tuple(LIBRARY_THREADS))
            and type(thread).__name__ not in LIBRARY_THREADS]


def _umask() -> State:
    mask = os.umask(0o077)
    os.umask(mask)
    return {"umask": mask}


def _torch(torch: Any) -> State:
    return {"default dtype": torch.get_default_dtype(), "number of threads": torch.get_num_threads(),
            "grad mode": torch.is_grad_enabled(), "deterministic": torch.are_deterministic_algorithms_enabled(),
            "random state": hash(torch.get_rng_state().numpy().tobytes())}


TRAITS: dict[str, Callable[[], State]] = {
    "environment": lambda: {name: value for name, value in os.environ.items() if name not in ALLOWED_VARIABLES},
    "working folder": _folder, "umask": _umask, "sys.path": lambda: {"sys.path": tuple(sys.path)},
    "signal handlers": lambda: {number.name: signal.getsignal(number) for number in signal.Signals},
    "threads": lambda: {f"{thread.name} {thread.ident}": "runs" for thread in _threads()},
    "random": lambda: {"random state": hash(random.getstate())},
    "numpy": _of("numpy.random", lambda module: {"random state": hash(module.get_state()[1].tobytes())}),
    "torch": _of("torch", _torch),
    "hydra": _of("hydra.core.global_hydra", lambda module: {"initialized": module.GlobalHydra.instance().is_initialized()}),
    "matplotlib": _of("matplotlib", lambda module: dict(dict.items(module.rcParams))),
}
"""The parts of the process's state that are compared, and how each is read."""
_told = set[str]()
"""Parts that a test of this module has failed for. What it has left is not told again of the module's fixtures."""


def changes(before: dict[str, State]) -> dict[str, str]:
    """What has changed since the states of these parts, by part."""
    found = {}
    for name, old in before.items():
        for thread in _threads() if name == "threads" else ():
            if f"{thread.name} {thread.ident}" not in old:
                thread.join(THREAD_SECONDS)
        new = TRAITS[name]()
        if name == "threads":
            new = old | new  # a thread may end
        differing = [key for key in {**old, **new} if old.get(key) != new.get(key)] if old and new else []
        if differing:
            found[name] = ", ".join(f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in differing)
    return found


def _guarded(culprit: str, *without: str) -> Iterator[None]:
    before = {name: read() for name, read in TRAITS.items() if name not in without}
    yield
    found = {name: difference for name, difference in changes(before).items() if not without or name not in _told}
    _told.update(found)
    if found:
        lines = (f"  {name}: {difference}" for name, difference in found.items())
        pytest.fail("\n".join([f"{culprit} leaves the process changed:", *lines]), pytrace=False)


@pytest.fixture(autouse=True)
def guard_of_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves the process changed."""
    yield from _guarded(request.node.nodeid)


@pytest.fixture(scope="module", autouse=True)
def guard_of_a_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the last test of a module whose fixtures leave the process changed."""
    _told.clear()
    yield from _guarded(f"a fixture of {request.node.nodeid}", "threads")
