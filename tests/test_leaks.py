"""The guard of tests/leaks.py names every test that leaves the process changed, and no other one."""

from __future__ import annotations

import re

import pytest

from tests import leaks, processes

PLANTED = {
    "environment": "import os; os.environ['PLANTED'] = '1'",
    "working folder": "import os; os.chdir('/')",
    "signal handlers": "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)",
    "threads": "import threading; threading.Thread(target=threading.Event().wait, name='planted', daemon=True).start()",
    "sys.path": "import sys; sys.path.append('/planted')",
    "umask": "import os; os.umask(0o012)",
    "warnings filters": "import warnings; warnings.simplefilter('ignore', BytesWarning)",
    "random state of random": "import random; random.random()",
    "random state of numpy": "numpy.random.seed(3)",
    "random state of torch": "torch.rand(1)",
    "torch": "torch.set_default_dtype(torch.float64); torch.set_num_threads(2); torch.set_grad_enabled(False)",
    "hydra": "hydra.initialize_config_module('dflash_mcmc.report', version_base='1.3').__enter__()",
    "matplotlib rcParams": "matplotlib.rcParams['font.size'] = 99",
}
SHOWN = {
    "environment": "PLANTED unset -> '1'", "working folder": "-> /", "signal handlers": "SIGUSR1",
    "threads": "planted (daemon) still runs", "sys.path": "'/planted' added", "umask": "-> 10",
    "torch": "grad mode True -> False", "hydra": "False -> True",
    "matplotlib rcParams": "font.size 10.0 -> 99.0",
}
"""Part of the line for a change."""
FILE = '''
import hydra, hydra.core.global_hydra, matplotlib, numpy.random, pytest, torch

{tests}

@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.chdir(tmp_path)

@pytest.fixture(scope="module")
def of_the_module():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)

def test_clean(kept, of_the_module):
    with torch.random.fork_rng():
        torch.rand(1)
'''
MODULE = '''
import os
import pytest

@pytest.fixture(scope="module")
def forgets():
    os.environ["PLANTED"] = "1"

def test_first(forgets):
    pass

def test_last():
    assert os.environ["PLANTED"]
'''


def planted_in(name: str) -> str:
    """The name of the test that plants a leak."""
    return f"test_{name.replace(' ', '_').replace('.', '_')}"


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> str:
    """What pytest prints about a file with a leak of every kind, and one whose fixture leaks."""
    folder = tmp_path_factory.mktemp("planted")
    tests = "\n".join(f"def {planted_in(name)}():\n    {code}\n" for name, code in PLANTED.items())
    (folder / "test_planted.py").write_text(FILE.format(tests=tests))
    (folder / "test_module.py").write_text(MODULE)
    # Without pytest's own handling of warnings, which brings the filters back after each phase of a test.
    # With CI set pytest repeats the whole message of each error in its summary.
    done = processes.run(["-m", "pytest", "-p", "tests.leaks", "-p", "no:warnings", "-p", "no:cacheprovider", "-rA"], folder,
                         CI=None, BUILD_NUMBER=None)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_a_leak_of_every_kind_is_planted():
    assert PLANTED.keys() == leaks.TRAITS.keys()


@pytest.mark.parametrize("name", PLANTED)
def test_a_leak_is_caught_and_its_test_named(name, printed):
    test = f"test_planted.py::{planted_in(name)}"
    (report,) = re.findall(rf"^{test} leaves the process changed:\n((?:  .*\n)+)", printed, re.MULTILINE)
    assert report.count("\n") == 1, "one leak is one line"
    assert report.startswith(f"  {name}: ")
    assert SHOWN.get(name, "") in report
    assert f"ERROR {test} - " in printed


def test_nothing_else_is_named(printed):
    assert printed.count("leaves the process changed:\n") == len(PLANTED) + 1
    assert "a fixture of test_module.py leaves the process changed:\n  environment: PLANTED unset -> '1'\n" in printed
    assert "ERROR test_planted.py::test_clean" not in printed
    assert "PASSED test_planted.py::test_clean" in printed
    assert "ERROR test_module.py::test_last - " in printed
