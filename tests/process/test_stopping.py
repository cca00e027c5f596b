"""SIGTERM, SIGUSR1, SIGUSR2: what is under way is finished in the grace time, the rest given up; nothing is lost, or twice."""

import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import Future

import psutil
import pytest

from dflash_mcmc.process import stopping
from tests import processes
from tests.runs import QUICK, finish, folder_of, held, records_of, same, start, wait_for_records
from tests.tracker import lines
from tests.tracker.test_wandb import entries

WHOLE = ("dataset.limit=8", "num_chains=2", "tracker=trackio")


@pytest.fixture(autouse=True)
def _lines(monkeypatch):
    lines.use(monkeypatch.setattr)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_what_is_under_way_is_finished_and_nothing_new_begun(tmp_path, uninterrupted, number):
    with start(tmp_path, *WHOLE, "hardware.num_slots=4", until=2) as run:
        wait_for_records(tmp_path, 2, run)
        os.kill(run.pid, number)
        at_most = len(records_of(folder_of(tmp_path))) + 4 + 4 + 2  # in the slots, read ahead, in between
        _, told = run.communicate(timeout=processes.HANG)
    assert run.returncode == 143
    assert f"stopped by {number.name}; nothing recorded is lost: run the same command again" in told
    assert "Traceback" not in told
    folder = folder_of(tmp_path)
    assert 2 + 4 <= len(records_of(folder)) + 1 <= at_most + 1
    begun = [json.loads(line)["begun"] for line in (folder / "attempts.jsonl").read_text().splitlines()]
    assert begun.count(True) == len(records_of(folder))  # all that was begun was recorded, and nothing given up
    assert {"preempted": True} in [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    same(finish(tmp_path, *WHOLE), uninterrupted)
    steps = [json.loads(line).get("step") for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step for step in steps if step] == list(range(1, 17))


@pytest.mark.slow
def test_without_grace_it_is_given_up(tmp_path, uninterrupted):
    with start(tmp_path, *WHOLE, "hardware.num_slots=4", "hardware.grace_seconds=0", until=2) as run:
        wait_for_records(tmp_path, 2, run)
        os.kill(run.pid, signal.SIGUSR1)
        run.communicate(timeout=processes.HANG)
    assert run.returncode == 143
    folder = folder_of(tmp_path)
    begun = [json.loads(line)["begun"] for line in (folder / "attempts.jsonl").read_text().splitlines()]
    assert begun.count(False) == begun.count(True) - len(records_of(folder)) > 0
    same(finish(tmp_path, *WHOLE), uninterrupted)


def test_a_sweep_ends_as_a_whole(tmp_path):
    """The point that is being drawn is left, and none is begun behind it."""
    command = held(1, "-m", "experiment=demo", "condition=ps", "sampler.num_blocks=8", "seed=1,2,3", *WHOLE,
                   "hardware.num_slots=2")
    with processes.start(command, tmp_path) as run:
        wait_for_records(tmp_path, 1, run)
        os.kill(run.pid, signal.SIGTERM)
        out, told = run.communicate(timeout=processes.HANG)
    assert run.returncode == 143
    assert "stopped by SIGTERM" in told
    assert len(list((tmp_path / "outputs/demo").glob("power_mh-*"))) == 1
    assert "jobs" not in out


def waiting(seconds: float) -> float:
    """Sleeps until Stopped comes; the seconds until then, or all of them."""
    started = time.monotonic()
    with contextlib.suppress(stopping.Stopped):
        time.sleep(seconds)
    return time.monotonic() - started


def test_a_termination_leaves_no_more_than_its_own_grace(monkeypatch):
    monkeypatch.setattr(stopping, "_TERM_SECONDS", 0.2)
    with stopping.handling_signals(60):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stopping.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert waiting(10) < 5
    assert not stopping.requested()


@pytest.mark.slow
def test_a_later_signal_gives_no_more_time():
    with stopping.handling_signals(4.0):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert waiting(10) < 3.8


def test_outside_signals_do_what_they_did():
    before = [signal.getsignal(number) for number in (*stopping.SIGNALS, signal.SIGALRM)]
    with stopping.handling_signals(1):
        os.kill(os.getpid(), signal.SIGUSR2)
        with pytest.raises(stopping.Stopped, match="SIGUSR2"):
            stopping.check()
    assert [signal.getsignal(number) for number in (*stopping.SIGNALS, signal.SIGALRM)] == before
    assert waiting(1.2) >= 1.2  # no alarm is left behind
    stopping.check()


def test_in_another_thread_nothing_is_set():
    def body():
        with stopping.handling_signals(1):
            found.append(signal.getsignal(signal.SIGTERM))

    found = []
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.slow
def test_a_signal_to_every_process_leaves_the_tracker_time_for_what_is_told_last(tmp_path, uninterrupted):
    """As SLURM sends it: to the run, to W&B's own process, and to those that grade."""
    environment = {f"WANDB_{name.upper()}_DIR": str(tmp_path / name) for name in ("data", "cache", "config")}
    command = held(2, "experiment=demo", *QUICK, "dataset.limit=12", "num_chains=2", "tracker=wandb", "hardware.num_slots=4")
    with processes.start(command, tmp_path, WANDB_MODE="offline", **environment) as run:
        wait_for_records(tmp_path, 2, run)
        everybody = [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]
        assert any("wandb" in process.name() for process in everybody[:-1])
        for process in everybody:
            process.terminate()
        _, told = run.communicate(timeout=processes.HANG)
    assert run.returncode == 143
    assert "failed and is off" not in told
    segments = sorted((tmp_path / "outputs" / "wandb").glob("offline-run-*"))
    assert len(segments) == 2  # the second one of the process that was started then
    steps = {row["item"]["finished"] for segment in segments for row in entries(segment, "history")}
    records = records_of(folder_of(tmp_path))
    assert steps == set(range(1, len(records) + 1)) > {1, 2}
    assert entries(segments[-1], "preempting")
    assert all(record["verdict"] not in ("error", "timeout") for record in records.values())
    finished = finish(tmp_path, "dataset.limit=12", "num_chains=2", "tracker=none")
    assert len(finished) == 24
    same({key: finished[key] for key in uninterrupted}, uninterrupted)


def test_a_wait_ends_for_a_signal_that_another_thread_receives():
    """The main thread runs the handler, and the kernel does not wake it."""
    future: Future[bool] = Future()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: future.done() or future.set_result(True))
    receives = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
    gives_up = threading.Timer(processes.HANG / 10, lambda: future.done() or future.set_result(False))
    try:
        receives.start()
        gives_up.start()
        stopping.wait_for([future])
        assert future.result() is True
    finally:
        gives_up.cancel()
        receives.join()
        gives_up.join()
        signal.signal(signal.SIGUSR1, before)
