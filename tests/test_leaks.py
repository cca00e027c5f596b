"""The guard of tests/leaks.py names every test that leaves the process changed, and no other one."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests import leaks, processes

PLANTED = {
    "environment": "import os; os.environ['PLANTED'] = '1'",
    "working folder": "import os; os.chdir('/')",
    "umask": "import os; os.umask(0o012)",
    "sys.path": "import sys; sys.path.append('/planted')",
    "signal handlers": "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)",
    "threads": "import threading; threading.Thread(target=threading.Event().wait, name='planted', daemon=True).start()",
    "random": "import random; random.random()",
    "numpy": "numpy.random.seed(3)",
    "torch": "torch.rand(1); torch.set_default_dtype(torch.float64)",
    "hydra": "hydra.initialize_config_module('dflash_mcmc.report', version_base='1.3').__enter__()",
    "matplotlib": "matplotlib.rcParams['font.size'] = 99",
}
SHOWN = {"environment": "PLANTED: None -> '1'", "threads": "planted ", "torch": "default dtype: ", "matplotlib": "font.size: "}
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
    os.environ["FORGOTTEN"] = "1"

def test_first(forgets):
    pass

def test_last():
    assert os.environ["FORGOTTEN"]
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
    # With CI set pytest repeats the whole message of each error in its summary.
    done = processes.run(["-m", "pytest", "-p", "tests.leaks", "-p", "no:cacheprovider", "-rA"], folder, CI=None,
                         BUILD_NUMBER=None)
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
    assert "a fixture of test_module.py leaves the process changed:\n  environment: FORGOTTEN: None -> '1'\n" in printed
    assert "ERROR test_planted.py::test_clean" not in printed
    assert "PASSED test_planted.py::test_clean" in printed
    assert "ERROR test_module.py::test_last - " in printed


# Forked programs behave like others: their arguments, output, exit codes and signals are the same.

TELL = """
import json, os, sys
print(json.dumps([sys.argv, sys.orig_argv, sys.path[0], os.getcwd(), *map(os.environ.get, ("GIVEN", "TAKEN")), __name__,
                  "dflash_mcmc" in sys.modules, os.getpgid(0) == os.getpid(), sys.stdin.read()]))
sys.stderr.write("message")
sys.exit(3)
"""


@pytest.mark.parametrize("arguments", [
    ("-m", "given", "a b", "$c"), *(pytest.param(given, marks=pytest.mark.slow) for given in (
        ("-c", TELL, "a b", "$c"), ("given.py", "a b", "$c")))], ids=["module", "code", "file"])
def test_a_forked_program_behaves_like_a_new_interpreter(arguments, tmp_path, monkeypatch):
    (tmp_path / "given.py").write_text(TELL)
    monkeypatch.setenv("TAKEN", "x")
    monkeypatch.chdir(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "TAKEN"}
    new = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env={**environment, "GIVEN": "1"}, text=True,
                         stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True)
    forked = processes.run(arguments, tmp_path, GIVEN="1", TAKEN=None)
    assert (forked.returncode, forked.stdout, forked.stderr) == (new.returncode, new.stdout, new.stderr)
    assert (new.returncode, new.stderr) == (3, "message")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_reach_the_program(number, code, tmp_path):
    waiting = "import sys, time\nprint('here', flush=True)\ntry: time.sleep(600)\nexcept KeyboardInterrupt: sys.exit(130)"
    with processes.start(["-c", waiting], tmp_path) as program:
        processes.wait_until(lambda: program.stdout == "here\n")
        assert program.poll() is None
        program.send_signal(number)
        assert program.communicate(timeout=processes.HANG) == ("here\n", program.stderr)
    assert program.returncode == code


def test_at_a_timeout_the_program_and_its_children_are_killed(tmp_path):
    started = "import subprocess, time\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\ntime.sleep(60)"
    with processes.start(["-c", started], tmp_path) as program:
        processes.wait_until(lambda: program.stdout.endswith("\n"))
        with pytest.raises(subprocess.TimeoutExpired):
            program.communicate(timeout=0.01)
    assert program.returncode == -signal.SIGKILL
    processes.wait_until(lambda: not _runs(int(program.stdout)))


@pytest.mark.parametrize(("computed", "ends"), [((50.0, 60.0, 61.0), True), ((50.0, 50.2), False), ((0.0,), False)],
                         ids=["slow", "stops", "waits"])
def test_a_program_hangs_if_it_no_longer_computes(monkeypatch, computed, ends):
    """A slow program has all the time it needs; the seconds of a processor that it has used say that it goes on."""
    class Slow:
        pid, args, returncode, looks = os.getpid(), ["slow"], 0, iter(range(len(computed)))

        def communicate(self, timeout):
            for _ in self.looks:
                raise subprocess.TimeoutExpired(self.args, timeout)
            return "done\n", ""

    used = iter(computed)
    monkeypatch.setattr(processes, "_computed", lambda pid: next(used))
    if ends:
        assert processes.result_of(Slow(), timeout=100.0).stdout == "done\n"
    else:
        with pytest.raises(subprocess.TimeoutExpired):
            processes.result_of(Slow(), timeout=100.0)


def test_what_a_program_and_its_children_compute_is_counted(tmp_path):
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    both = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r} + 'print(flush=True); time.sleep(600)'])"
    with processes.start(["-c", both], tmp_path) as program:
        processes.wait_until(lambda: program.stdout)
        assert processes._computed(program.pid) >= 0.2
    assert processes._computed(program.pid) == 0.0


def _runs(process: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def test_variables_that_are_read_at_import_cannot_be_changed(tmp_path):
    with pytest.raises(ValueError, match=r"HF_HOME: read when packages are imported"):
        processes.start(["-c", ""], tmp_path, HF_HOME="/nowhere")
