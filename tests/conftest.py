"""Shared fixtures. No test uses a network, and every run writes below a temporary folder."""

import functools
import gc
import os
import random  # noqa: TID251  (its state is kept, nothing is drawn from it)
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx  # noqa: F401 - its import draws from `random`
import pytest

from tests import processes
from tests.processes import HANG, ROOT

os.environ.update({
    **processes.OF_TESTS,
    # Programs that tests start in other folders import this checkout, not the one that is installed.
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
})

from dflash_mcmc.config.schema import Config
from dflash_mcmc.process import machine
from tests.composing import composed
from tests.leaks import guard_of_a_module, guard_of_a_test

__all__ = ["guard_of_a_module", "guard_of_a_test"]  # fixtures of every test

gc.set_threshold(50_000, 20, 10)  # with the defaults, garbage collection takes a quarter of the time for a configuration

VENDORS = {"intel": "GenuineIntel", "amd": "AuthenticAMD"}
SHARED = ROOT.parent / "shared" / "data"
"""Real data next to the checkout. Tests that need it are skipped if it is missing."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor", choices=[*VENDORS, "this"], default="this",
                     help="the processor whose settings this process and the programs that tests start use")
    parser.addoption("--gpu-tests-on", choices=["cuda", "cpu"], default="cuda", help="the device of tests/gpu")


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the vendor. MKL reads its mode at the first product, which comes later."""
    chosen = config.getoption("--processor")
    if chosen != "this":
        os.environ[machine.VENDOR] = VENDORS[chosen]
        os.environ.pop(machine.VARIABLE, None)
        machine.keep_bits()


@pytest.fixture
def make_config(tmp_path) -> Callable[..., Config]:
    """A function from overrides to a typed configuration. Outputs are below the test's folder; the default tracker is none."""
    return functools.partial(composed, tmp_path)


@pytest.fixture
def command(tmp_path):
    """A function that runs a command in a separate process: command("dflash_mcmc", "sampler=greedy")."""

    def run(module: str, *arguments: str, timeout: float = HANG, **environment: str) -> subprocess.CompletedProcess:
        return processes.run(["-m", module, *arguments], tmp_path, timeout, **environment)

    return run


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> dict[tuple[str, int], dict]:
    """Records of the quick run of tests/runs.py in one go."""
    from tests import runs

    return runs.finish(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def random_weights() -> Iterator[None]:
    """Brings back PyTorch's random state, from which the weights of a new model are drawn."""
    import torch

    with torch.random.fork_rng():
        yield


@pytest.fixture
def python_random() -> Iterator[None]:
    """Brings back the random state of Python's `random`, from which W&B draws."""
    state = random.getstate()
    yield
    random.setstate(state)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real data. Skips the test if it is missing."""
    if not SHARED.is_dir():
        pytest.skip(f"real data not found at {SHARED}")
    return SHARED
