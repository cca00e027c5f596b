"""A job's supervisor with a stand-in for its worker and for SLURM: what is retried, what is requeued, what ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.grid import cluster, supervise
from dflash_mcmc.grid.folder import Grid
from dflash_mcmc.grid.supervise import Supervisor
from tests.conftest import ROOT

WORKER = """
import os, pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
with (here / "starts").open("a") as file:
    file.write(os.environ["DFLASH_MCMC_SHARD"] + "\\n")
number = len((here / "starts").read_text().split())
def heed(signum, frame):
    with (here / "heard").open("a") as file:
        file.write(signal.Signals(signum).name + "\\n")
    sys.exit(143)
def wait(*numbers):
    for one in numbers:
        signal.signal(one, heed)
    (here / "ready").touch()
    time.sleep(20)
    sys.exit(9)
"""
NOTICES = "signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM"


@pytest.fixture
def job(make_grid, slurm_commands, monkeypatch, tmp_path):
    """Runs a supervisor over a worker of these lines. `events` and `starts` are what came of it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    slurm_commands.answer("scontrol-job", "JobId=7 JobState=RUNNING Reason=None\n")
    yield Job(make_grid, slurm_commands, monkeypatch, tmp_path)
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Job:
    """A job of a grid with one point."""

    def __init__(self, make_grid, slurm_commands, monkeypatch, folder: Path):
        self._make_grid, self.slurm, self._patch, self._folder = make_grid, slurm_commands, monkeypatch, folder
        self.grid: Grid | None = None

    def run(self, lines: str, *fields: str) -> int:
        """Exit code of the supervisor."""
        script = self._folder / "worker.py"
        script.write_text(WORKER + lines)
        self.grid = self.grid or self._make_grid(*fields)
        self._patch.setattr(supervise, "_command", lambda grid, job, launcher: [sys.executable, str(script),
                                                                               *supervise._arguments(grid, job)])
        try:
            Supervisor(str(self.grid.folder), self.grid.token, 0, 1, 4, self.grid.launcher)()
        except SystemExit as stopped:
            return stopped.code
        return 0

    def when_ready(self, *numbers: signal.Signals) -> None:
        """Sends this process signals once the worker waits for them."""
        (self._folder / "ready").unlink(missing_ok=True)

        def send():
            until = time.monotonic() + 20
            while not (self._folder / "ready").exists() and time.monotonic() < until:
                time.sleep(0.05)
            for number in numbers if (self._folder / "ready").exists() else ():
                os.kill(os.getpid(), number)

        threading.Thread(target=send, daemon=True).start()

    @property
    def events(self) -> list[tuple[str, str]]:
        (path,) = (self.grid.folder / "jobs").glob("*.jsonl")
        return [(event["event"], event["reason"]) for event in map(json.loads, path.read_text().splitlines())]

    @property
    def starts(self) -> list[str]:
        return (self._folder / "starts").read_text().split()


WAITS = f"wait({NOTICES})"
USR1, USR2, TERM = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM
COMPLETE, CANCELLED = ("complete", ""), [("stopped", "SIGTERM: SLURM has ended the job (CANCELLED)")]
ENDS = {  # signals, state of the job, lines of the worker; exit code, events behind the first "started", calls of scontrol
    "well": ([], "RUNNING", "sys.exit(0)", 0, [COMPLETE], []),
    "deaths": ([], "RUNNING", "print('out of memory', file=sys.stderr, flush=True)\n"
               "os.kill(os.getpid(), signal.SIGKILL) if number < 3 else sys.exit(0)",
               0, [("died", "SIGKILL: out of memory"), ("died", "SIGKILL: out of memory | out of memory"), COMPLETE], []),
    "a signal to the worker alone": ([], "RUNNING", "sys.exit(143) if number == 1 else sys.exit(0)", 0,
                                     [("died", "exit code 143: no output"), COMPLETE], []),
    "a mistake of the user's": ([], "RUNNING", "print('error: dataset.path: given nothing', file=sys.stderr)\nsys.exit(2)", 2,
                                [("failed", "dataset.path: given nothing")], []),
    "a notice": ([USR1], "RUNNING", WAITS, 143, [("requeued", "SIGUSR1")], ["requeue 7"]),
    "another notice": ([USR2], "RUNNING", WAITS, 143, [("requeued", "SIGUSR2")], ["requeue 7"]),
    "done at the notice": ([USR1], "RUNNING", "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
                           "(here / 'ready').touch()\ntime.sleep(60)", 0, [COMPLETE], []),
    "preempted": ([TERM], "RUNNING", WAITS, 143, [("requeued", "SIGTERM")], ["show job 7", "requeue 7"]),
    "cancelled": ([TERM], "CANCELLED", WAITS, 143, CANCELLED, ["show job 7"]),
    "cancelled within the grace": ([USR1, TERM], "CANCELLED", WAITS, 143, CANCELLED, ["show job 7"]),
}


@pytest.mark.parametrize(("signals", "state", "lines", "code", "events", "asked"), ENDS.values(), ids=ENDS)
def test_how_a_worker_ends(job, signals, state, lines, code, events, asked):
    job.slurm.answer("scontrol-job", f"JobId=7 JobState={state} Reason=None\n")
    if signals:
        job.when_ready(*signals)
    assert job.run(lines) == code
    assert [event for event in job.events if event[0] != "started"] == events
    assert job.starts == ["1/4"] * (1 + sum(event == "died" for event, _ in events))
    calls = job.slurm.calls("scontrol")
    assert {*calls} == {f"scontrol {call}" for call in asked}
    assert calls.count("scontrol requeue 7") == asked.count("requeue 7")
    if events[-1][0] == "requeued":  # told again where it is slow to end
        assert set((job._folder / "heard").read_text().split()) == {signals[0].name}


def test_restarts_are_bounded(job, capfd):
    assert job.run("raise ValueError('broken')", "max_restarts=2") == 1
    assert len(job.starts) == 3
    event, reason = job.events[-1]
    assert event == "failed"
    assert "died 3 times without a new record, more than max_restarts=2" in reason
    assert "ValueError: broken" in reason
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: the worker died 3 times")


@pytest.mark.slow
def test_a_worker_that_dies_with_new_records_is_started_again_without_end(job):
    """As over several samples that kill: each is given up, and so recorded, after some deaths."""
    job.grid = job._make_grid("max_restarts=2")
    folder = Path(job.grid.points[0].folder)
    folder.mkdir(parents=True)
    assert job.run(f"open({str(folder / 'records.jsonl')!r}, 'a').write('x')\nsys.exit(number < 7)") == 0
    assert len(job.starts) == 7


def test_a_note_that_cannot_be_written_keeps_no_job_from_its_requeue(job, monkeypatch, capfd):
    def full(self, *given, **more):
        raise UserError("jobs/0000-1.jsonl: cannot be written: No space left on device")

    job.grid = job._make_grid()
    monkeypatch.setattr(Grid, "note", full)
    job.when_ready(signal.SIGUSR1)
    assert job.run(WAITS) == 143
    assert job.slurm.calls("scontrol") == ["scontrol requeue 7"]
    assert "this could not be noted: jobs/0000-1.jsonl: cannot be written" in capfd.readouterr().err


def test_a_torn_note_is_cut_off(job):
    assert job.run("sys.exit(0)") == 0
    (path,) = (job.grid.folder / "jobs").glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-30])
    assert job.run("sys.exit(0)") == 0
    assert [event for event, _ in job.events] == ["started", "started", "complete"]


def test_the_requeue_does_not_end_of_the_signal_that_it_causes(slurm_commands, tmp_path, monkeypatch):
    (tmp_path / "scontrol").write_text("#!/bin/sh\nkill -TERM $$\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    cluster.requeue("7")
    with pytest.raises(UserError, match="scontrol: exit code -15"):
        cluster.ask("scontrol", "requeue", "7")


@pytest.mark.slow
def test_a_worker_that_does_not_heed_is_killed_within_the_grace(job):
    job.when_ready(signal.SIGUSR1)
    started = time.monotonic()
    assert job.run("wait()", "grace_seconds=5") == 143
    assert time.monotonic() - started < 20
    assert job.events[-1] == ("requeued", "SIGUSR1")


def test_requeues_are_bounded(job):
    for _ in range(2):
        job.when_ready(signal.SIGUSR1)
        assert job.run(WAITS, "max_requeues=2") == 143
    job.when_ready(signal.SIGUSR1)
    assert job.run(WAITS) == 1
    assert len(job.slurm.calls("scontrol")) == 2
    assert "requeued 2 times before: max_requeues=2" in job.events[-1][1]


def test_a_requeue_that_slurm_refuses_is_told(job):
    job.slurm.refuse("scontrol-requeue", "slurm_requeue error: Job is not allowed\n")
    job.when_ready(signal.SIGUSR1)
    assert job.run(WAITS) == 1
    assert job.events[-1] == ("failed", "stopped by SIGUSR1, and SLURM does not requeue it: scontrol: slurm_requeue error: "
                                        "Job is not allowed")


@pytest.mark.parametrize("spoil", ["gone", "another", "other code"])
def test_a_folder_that_is_not_shared_or_has_other_code_is_one_line(job, make_grid, capfd, spoil):
    grid = job.grid = make_grid()
    if spoil == "gone":
        grid.folder.rename(grid.folder.with_name("elsewhere"))
    elif spoil == "other code":
        (grid.folder / "code").unlink()
        (grid.folder / "code").mkdir()
    else:
        other = grid.token
        grid.token = "feed"
        grid.save()
        grid.token = other
    assert job.run("sys.exit(0)") == 2
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    not_shared = f"{grid.folder} is not a folder that is shared with node"
    assert ("hydra.launcher.python" if spoil == "other code" else not_shared) in told


def test_several_processes_are_started_by_accelerate(make_grid):
    grid = make_grid("processes=2")
    command = supervise._command(grid, one := supervise.SlurmJob(id="7", point=3, shard=0, shards=1), grid.launcher)
    assert command[1:3] == ["-m", "accelerate.commands.launch"]
    assert command[command.index("--num_processes") + 1] == "2"
    assert command[-4:] == ["-m", "dflash_mcmc.grid.work", str(grid.folder), "3"]
    assert supervise._launch(grid.launcher) == {"ACCELERATE_USE_CPU": "true"}
    assert supervise._launch(make_grid("processes=2", "gpus=2").launcher) == {}
    assert supervise._command(one_process := make_grid(), one, one_process.launcher)[1:3] == ["-m", "dflash_mcmc.grid.work"]


ORPHAN = """
import os, signal, subprocess
from dflash_mcmc.process.worker import die_with_parent
print(subprocess.Popen(["sleep", "60"], preexec_fn=die_with_parent).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_does_not_outlive_its_supervisor():
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, cwd=ROOT) as supervisor:
        worker = int(supervisor.stdout.readline())
    until = time.monotonic() + 10
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(("code", "endings", "joined"), [(0, "0\n0\n", 0), (0, "0\n143\n", 143), (0, "143\n2\n", 2),
                                                         (1, "143\n", 1), (-9, None, -9), (0, None, 0)])
def test_processes_of_a_launch_end_as_one(tmp_path, code, endings, joined):
    if endings is not None:
        (tmp_path / "endings").write_text(endings)
    assert supervise._joined(code, tmp_path / "endings") == joined


@pytest.mark.parametrize("kind", ["file", "nothing", "device"])
def test_a_log_that_is_a_link_is_not_followed(job, make_grid, tmp_path, capsys, kind):
    """Nothing is written where it leads, no worker starts, and the job ends with one line."""
    other = {"file": tmp_path / "other", "nothing": tmp_path / "none", "device": Path("/dev/null")}[kind]
    if kind == "file":
        other.write_text("kept\n")
    job.grid = make_grid()
    log = job.grid.folder / "logs" / "0000-1.log"
    log.symlink_to(other)
    assert job.run("print('said')") == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert f"{log}: is a link to '{str(other)[:40]}" in said
    assert "allowed: a regular file" in said
    assert [event for event, _ in job.events] == ["started", "failed"]
    assert not (tmp_path / "starts").exists()
    if kind == "file":
        assert other.read_text() == "kept\n"
    assert other.exists() == (kind != "nothing")
