"""Forked programs behave like others: their arguments, output, exit codes and signals are the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests import processes

TELL = """
import json, os, sys
print(json.dumps([sys.argv, sys.orig_argv, sys.path[0], os.getcwd(), *map(os.environ.get, ("GIVEN", "TAKEN")), __name__,
                  "dflash_mcmc" in sys.modules, os.getpgid(0) == os.getpid(), sys.stdin.read()]))
sys.stderr.write("message")
sys.exit(3)
"""


@pytest.mark.parametrize("arguments", [("-c", TELL, "a b", "$c"), ("-m", "given", "a b", "$c"), ("given.py", "a b", "$c")],
                         ids=["code", "module", "file"])
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


def test_an_error_ends_the_program_with_a_traceback(tmp_path):
    done = processes.run(["-c", "import torch\nassert torch.ones(2).sum() == 2\nraise LookupError('here')"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "LookupError: here"


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


def _runs(process: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def test_variables_that_are_read_at_import_cannot_be_changed(tmp_path):
    with pytest.raises(ValueError, match=r"HF_HOME: read when packages are imported"):
        processes.start(["-c", ""], tmp_path, HF_HOME="/nowhere")
