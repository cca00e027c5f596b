"""Errors that the user can mend are one line, and all others keep their traceback."""

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dflash_mcmc
from dflash_mcmc.__main__ import main
from dflash_mcmc.errors import UserError
from dflash_mcmc.process import machine, program, ranks
from dflash_mcmc.process.turns import Turn
from tests import processes
from tests.refusals import refused
from tests.targets import rows_do_not_depend_on_the_batch


def raising(error):
    def body():
        raise error
    return body


def failed_on_a_cpu():
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("body", [raising(torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")),
                                  failed_on_a_cpu], ids=["gpu", "cpu"])
def test_memory_that_runs_out_is_one_line(body, capsys):
    assert program.guarded(body) == program.USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith("error: hardware.memory_gb: the memory ran out while the run was computing (")
    assert error.count("\n") == 1
    assert "the same command continues" in error


@pytest.mark.parametrize("error", [RuntimeError("a shape is wrong"), FileNotFoundError(2, "missing"), ValueError("x")])
def test_other_errors_are_raised(error):
    with pytest.raises(type(error)):
        program.guarded(raising(error))


def test_a_traceback_is_shown_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("DFLASH_MCMC_TRACEBACK", "1")
    with pytest.raises(UserError, match="known"):
        program.guarded(raising(UserError("known")))


def test_the_version_is_ours(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dflash_mcmc {dflash_mcmc.__version__}\n"


# The same bits in every batch, on a processor where MKL does not give them by itself.

def mode(cpuinfo: Path, **environment: str) -> str | None:
    """The mode that `keep` leaves in an environment."""
    machine.keep_bits(environment, cpuinfo)
    return environment.get(machine.VARIABLE)


@pytest.mark.parametrize(("vendor", "expected"), [("GenuineIntel", "AUTO,STRICT"), ("AuthenticAMD", None)])
def test_the_mode_is_strict_where_it_is_needed_and_a_mode_that_is_set_stays(tmp_path, vendor, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    assert mode(cpuinfo) == expected
    assert mode(cpuinfo, **{machine.VARIABLE: "COMPATIBLE"}) == "COMPATIBLE"
    assert mode(tmp_path / "no_such_file") is None
    assert mode(tmp_path / "no_such_file", **{machine.VENDOR: vendor}) == expected
    (other,) = {"GenuineIntel", "AuthenticAMD"} - {vendor}
    cpuinfo.write_text(f"vendor_id\t: {other}\n")
    assert mode(cpuinfo, **{machine.VENDOR: vendor}) == expected


def test_programs_that_tests_start_have_the_mode_of_this_process(tmp_path):
    """The mode depends on `--processor` alone, also where a program sets it for itself."""
    show = f"import dflash_mcmc, os; print(os.environ.get({machine.VARIABLE!r}))"
    assert processes.run(["-c", show], tmp_path).stdout.strip() == str(os.environ.get(machine.VARIABLE))


def test_rows_have_the_same_bits_in_every_batch_here():
    """Rows of the embedded model's widths. On a processor of another kind records are equal except in their last bits."""
    if os.environ.get(machine.VARIABLE) != "AUTO,STRICT":
        pytest.skip("strict mode is off: --processor=intel turns it on")
    assert rows_do_not_depend_on_the_batch()


# Where a process stands among those that draw together.

@pytest.mark.parametrize(("environment", "place", "waits"), [
    ({}, (0, 1), True),
    ({"RANK": "0", "WORLD_SIZE": "3"}, (0, 3), True),
    ({"RANK": "2", "WORLD_SIZE": "3"}, (2, 3), False),
    ({"DFLASH_MCMC_SHARD": "3/8"}, (3, 8), False),
    # The first process of a job stays for its others.
    ({"DFLASH_MCMC_SHARD": "3/8", "RANK": "0", "WORLD_SIZE": "2"}, (6, 16), True),
    ({"DFLASH_MCMC_SHARD": "3/8", "RANK": "1", "WORLD_SIZE": "2"}, (7, 16), False),
])
def test_place_among_the_processes_of_a_run(monkeypatch, environment, place, waits):
    for name in ("RANK", "WORLD_SIZE", ranks.SHARD):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks.place() == place
    assert ranks.waits() == waits


# Threads take turns, and a thread does not wait for itself.

def test_another_thread_waits():
    turn, order = Turn(), []

    def other() -> None:
        with turn.taken(nests=True):
            order.append("other")

    with turn.taken(nests=False):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.05)
        order.append("this")
    thread.join()
    assert order == ["this", "other"]


def test_the_same_thread_nests_or_is_refused():
    turn = Turn()
    with turn.taken(nests=False):
        with turn.taken(nests=True):
            pass
        with refused(start="engine: given a second call while a stream of the same model is open"), turn.taken(nests=False):
            pass
    with turn.taken(nests=False):
        pass


def test_another_thread_can_end_a_turn():
    turn = Turn()
    taken = turn.taken(nests=False)
    thread = threading.Thread(target=taken.__enter__)
    thread.start()
    thread.join()
    taken.__exit__(None, None, None)
    with turn.taken(nests=False):
        pass


@pytest.mark.parametrize(("given", "expected"), [
    ({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)])
def test_threads_spin_briefly_unless_the_user_says_how_they_wait(given, expected):
    environment = dict(given)
    machine.spin_briefly(environment)
    assert environment.get("GOMP_SPINCOUNT") == expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory as it likes")
@pytest.mark.parametrize(("given", "keeps"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_freed_memory_is_kept_unless_the_user_says_what_is(given, keeps):
    program = """if 1:
        import resource
        import numpy as np
        from dflash_mcmc.process import machine
        machine.keep_memory()
        np.ones(2**26, np.uint8)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            np.ones(2**26, np.uint8)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / 2**26)
    """
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "NUMPY_MADVISE_HUGEPAGE": "0", **given}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert (float(done.stdout) < 1) == keeps  # of ten times the array


def test_output_without_a_reader_is_an_exit_code(monkeypatch):
    """Also what is still in the buffer at the end."""
    for text in ("text", "text\n" * 10_000):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as output:
            monkeypatch.setattr(sys, "stdout", output)
            assert program.guarded(lambda text=text: print(text)) == program.NO_READER
            monkeypatch.undo()


def test_free_memory_is_that_of_the_control_group(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=900))
    own, files = tmp_path / "own", {"memory.max": "max", "jobs/memory.max": "500", "jobs/memory.current": "450",
                                    "jobs/mine/memory.max": "1000", "jobs/mine/memory.current": "300"}
    (tmp_path / "jobs/mine").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    for group, free in (("/jobs/mine", 50), ("/jobs", 50), ("/", 900)):
        own.write_text(f"4:memory:/other\n0::{group}\n")
        assert machine.free_memory(own, tmp_path) == free
    (tmp_path / "jobs/memory.stat").write_text("file 400\nactive_file 30\ninactive_file 20\n")
    own.write_text("0::/jobs/mine\n")
    assert machine.free_memory(own, tmp_path) == 100
    assert machine.free_memory(tmp_path / "none", tmp_path / "none") == 900


@pytest.mark.slow
def test_a_flag_of_hydra_whose_reader_has_gone_shows_no_traceback(tmp_path):
    """As with `--cfg all | head -1`. Hydra would print the traceback itself."""
    line = f"'{sys.executable}' -m dflash_mcmc --cfg all condition=ps | true; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert (ended.stdout, ended.stderr) == (f"{program.NO_READER}\n", "")
