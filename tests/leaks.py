"""Every test leaves the process as it found it: a guard that compares the process before and after each test.

tests/conftest.py imports the two fixtures, which makes them run for every test. A test that changes the process fails in its
teardown with a line for each change.

The function guard is the first fixture of a test to start and the last one to end, so fixtures of wider scope may change the
process for their scope. The module guard compares the process around a module in the same way. It sees what module-scoped
fixtures leave behind. It does not compare threads, because a session-scoped fixture may start some within a module, nor the
warnings filters, which pytest sets for each test.
"""

from __future__ import annotations

import os
import random  # noqa: TID251  (its state is compared here, nothing is drawn from it)
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

ABSENT = object()
"""The state of a package that is not imported; it is compared with nothing."""
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


def _imported(package: str, read: Callable[[object], object]) -> Callable[[], object]:
    """Reads a state from a package if the process has imported it."""

    def state() -> object:
        module = sys.modules.get(package)
        return ABSENT if module is None else read(module)

    return state


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ALLOWED_VARIABLES}


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _handlers() -> dict[signal.Signals, object]:
    return {number: signal.getsignal(number) for number in _SIGNALS}


def _threads() -> dict[threading.Thread, str]:
    return {thread: f"{thread.name}{' (daemon)' if thread.daemon else ''}" for thread in threading.enumerate()
            if not thread.name.startswith(tuple(LIBRARY_THREADS))
            and type(thread).__name__ not in LIBRARY_THREADS}


def _umask() -> int:
    state = os.umask(0o077)
    os.umask(state)
    return state


def _numpy_random(module: object) -> tuple:
    name, words, *rest = module.get_state()
    return name, words.tobytes(), *rest


def _torch_settings(torch: object) -> dict[str, object]:
    return {"default dtype": torch.get_default_dtype(), "number of threads": torch.get_num_threads(),
            "grad mode": torch.is_grad_enabled(), "deterministic": torch.are_deterministic_algorithms_enabled()}


_SIGNALS = sorted(signal.valid_signals())
TRAITS: dict[str, Callable[[], object]] = {
    "environment": _environment, "working folder": _folder, "signal handlers": _handlers, "threads": _threads,
    "sys.path": lambda: list(sys.path), "umask": _umask, "warnings filters": lambda: list(warnings.filters),
    "random state of random": random.getstate,
    "random state of numpy": _imported("numpy.random", _numpy_random),
    "random state of torch": _imported("torch", lambda torch: torch.get_rng_state().numpy().tobytes()),
    "torch": _imported("torch", _torch_settings),
    "hydra": _imported("hydra.core.global_hydra", lambda module: module.GlobalHydra.instance().is_initialized()),
    "matplotlib rcParams": _imported("matplotlib", lambda module: dict(dict.items(module.rcParams))),
}
"""The parts of the process's state that are compared, and how each is read."""
_told = set[str]()
"""Parts that a test of this module has failed for. What it has left is not told again of the module's fixtures."""


class Snapshot(NamedTuple):
    """The state of the process."""

    states: dict[str, object]
    """Of every part."""
    modules: int
    """The number of imported modules."""


def snapshot() -> Snapshot:
    """The present state of the process."""
    return Snapshot({name: read() for name, read in TRAITS.items()}, len(sys.modules))


def changes(before: Snapshot) -> dict[str, str]:
    """What has changed since a snapshot, by part."""
    found = {}
    for name, old in before.states.items():
        new = TRAITS[name]()
        if old is ABSENT or new is ABSENT or new == old:
            continue
        if name == "warnings filters" and len(sys.modules) > before.modules:
            continue  # packages add filters when they are imported, and pytest removes them after the test
        if name == "threads":
            new = _running(old)
        if difference := _difference(name, old, new):
            found[name] = difference
    return found


def _running(old: dict[threading.Thread, str]) -> dict[threading.Thread, str]:
    """The old threads and the new ones that do not end by themselves."""
    for thread in _threads().keys() - old.keys():
        thread.join(THREAD_SECONDS)
    return old | _threads()


def _difference(name: str, old: object, new: object) -> str:
    if name.startswith("random state"):
        return "something was drawn from it, or it was seeded"
    if name == "threads":
        return ", ".join(f"{new[thread]} still runs" for thread in new.keys() - old.keys())
    if isinstance(old, dict) and isinstance(new, dict):
        states = [(key, _of(old, key), _of(new, key)) for key in {**old, **new}]
        return ", ".join(f"{_shown(key)} {before} -> {after}" for key, before, after in states if before != after)
    if isinstance(old, list):
        return ", ".join([*(f"{entry!r} removed" for entry in old if entry not in new),
                          *(f"{entry!r} added" for entry in new if entry not in old)]) or "the order is another"
    return f"{_shown(old)} -> {_shown(new)}"


def _of(state: dict, key: object) -> str:
    return repr(state[key]) if key in state else "unset"


def _shown(value: object) -> str:
    return value.name if isinstance(value, signal.Signals) else str(value)


def _guarded(culprit: str, *without: str) -> Iterator[None]:
    before = snapshot()
    for name in without:
        del before.states[name]
    yield
    found = {name: difference for name, difference in changes(before).items() if not without or name not in _told}
    _told.update(found)
    if found:
        pytest.fail("\n".join([f"{culprit} leaves the process changed:", *(f"  {name}: {difference}" for name, difference in
                                                                           found.items())]), pytrace=False)


@pytest.fixture(autouse=True)
def guard_of_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves the process changed."""
    yield from _guarded(request.node.nodeid)


@pytest.fixture(scope="module", autouse=True)
def guard_of_a_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the last test of a module whose fixtures leave the process changed."""
    _told.clear()
    yield from _guarded(f"a fixture of {request.node.nodeid}", "threads", "warnings filters")
