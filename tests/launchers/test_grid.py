"""Grids on a real SLURM: after any fault of the jobs, the records are complete, unique and equal to those of one process."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dflash_mcmc.grid import __main__
from dflash_mcmc.grid.folder import Grid, find
from dflash_mcmc.store.files import from_line
from tests.conftest import ROOT
from tests.processes import HANG
from tests.runs import TIMES

SHORT = ("tracker=none", "hardware=slurm_cpu", "cpus=1", "memory_gb=1", "dataset.max_new_tokens=24", "hardware.num_slots=4")
LONG = ("condition=ps", "tracker=none", "hardware=slurm_cpu", "cpus=1", "memory_gb=1", "hardware.num_slots=4",
        "sampler.num_steps=4", "dataset.limit=16")


class Submitter:
    """Runs the commands of `python -m dflash_mcmc.grid` in a separate folder."""

    def __init__(self, cluster, folder: Path, code: Path | str = ROOT):
        self.cluster, self.folder, self._code = cluster, folder, code

    def run(self, *arguments: str, module: str = "dflash_mcmc.grid", code: int = 0) -> subprocess.CompletedProcess:
        environment = {**self.cluster.environment, "PYTHONPATH": str(self._code), "OMP_NUM_THREADS": "1",
                       "DFLASH_MCMC_TRACEBACK": ""}
        done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=self.folder, env=environment,
                              capture_output=True, text=True, timeout=HANG)
        assert done.returncode == code, done.stderr + done.stdout
        return done

    def submit(self, *arguments: str) -> Grid:
        self.run("submit", *arguments)
        return self.grid()

    def grid(self) -> Grid:
        """The newest grid in its current state."""
        return find([], self.folder / "outputs")[0]

    def wait(self, seconds: float = HANG) -> None:
        """Waits until no job waits or runs, including requeued jobs."""
        self.cluster.wait_until(lambda: not self.live(), "the grid's jobs to end", seconds)

    def live(self) -> list[str]:
        """Ids of the grid's jobs that wait or run."""
        ids = {job.id for job in self.grid().jobs}
        return [job for job in self.cluster.live() if job in ids]

    def wait_for_records(self, count: int, seconds: float = HANG) -> None:
        """Waits until the run of the only point has at least `count` records."""
        self.cluster.wait_until(lambda: len(keys(self.records()[0])) >= count, f"{count} records", seconds)

    def records(self) -> list[list[dict]]:
        """The records of every point."""
        return [records_of(Path(point.folder)) for point in self.grid().points]

    def events(self) -> dict[str, list[str]]:
        """The events of every job, by the name of the job."""
        grid = self.grid()
        return {job.name: [event["event"] for event in grid.events(job)] for job in grid.jobs}


def records_of(folder: Path) -> list[dict]:
    """Records in the order of the samples, without an incomplete last line."""
    lines = [line for path in folder.glob("records*.jsonl") for line in path.read_bytes().split(b"\n")[:-1]]
    return sorted((from_line(line) for line in lines), key=lambda record: (record["problem"], record["chain"]))


def keys(records: list[dict]) -> list[tuple[str, int]]:
    return [(record["problem"], record["chain"]) for record in records]


def without_times(records: list[dict]) -> list[dict]:
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def check_complete(submitter: Submitter, reference: list[dict]) -> None:
    """Checks that every record exists once and equals that of a single process."""
    (records,) = submitter.records()
    assert keys(records) == keys(reference)
    differing = {(record["problem"], name): (record[name], other[name])
                 for record, other in zip(records, reference, strict=True)
                 for name in record.keys() - set(TIMES) if record[name] != other[name]}
    assert differing == {}


@pytest.fixture
def submitter(slurm, tmp_path) -> Submitter:
    return Submitter(slurm, tmp_path)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> list[dict]:
    """The records of the run LONG, drawn by a single process."""
    return drawn_alone(tmp_path_factory.mktemp("alone"), *[text for text in LONG if text.startswith(("condition", "sampler",
                                                                                                  "dataset"))])[0]


def drawn_alone(folder: Path, *arguments: str) -> list[list[dict]]:
    """Records of every run, drawn by one process without SLURM, sorted by the names of the run folders."""
    subprocess.run([sys.executable, "-m", "dflash_mcmc", "-m", "tracker=none", *arguments], cwd=folder, check=True,
                   capture_output=True, timeout=HANG, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    return [records_of(path.parent) for path in sorted((folder / "outputs").rglob("run.json"))]


def worker_of(submitter: Submitter, shard: int) -> psutil.Process:
    """The process that draws a shard of the only point."""
    grid = submitter.grid()

    def found() -> psutil.Process | None:
        for process in psutil.process_iter():
            try:
                if (process.cmdline()[-4:] == ["-m", "dflash_mcmc.grid.work", str(grid.folder), "0"]
                        and process.environ()["DFLASH_MCMC_SHARD"].startswith(f"{shard}/")):
                    return process
            except psutil.Error:
                continue
        return None

    return submitter.cluster.wait_until(found, f"a worker of shard {shard}")


def test_a_grid_in_shards_has_the_records_of_one_process_despite_edits_after_submission(slurm, tmp_path):
    """Code and configuration are overwritten after the submission, before any job has started Python.

    Two of the three conditions lack a field of the sweep: 1 + 2 + 2 points.
    """
    code = tmp_path / "code"
    for part in ("dflash_mcmc", "conf"):
        shutil.copytree(ROOT / part, code / part, ignore=shutil.ignore_patterns("__pycache__"))
    submitter = Submitter(slurm, tmp_path, code)
    points = ("condition=greedy,temp,blend_greedy", "sampler.temperature=0.5,1", "blend.beta=0.1,0.2", "dataset.limit=4",
              "dataset.max_new_tokens=24")
    submitter.submit(*points, *SHORT, "shards=2", "array_parallelism=4", "setup=[sleep 3]")
    for path in code.rglob("*.py"):
        path.write_text("raise SystemExit('edited after submission')\n")
    for path in code.rglob("*.yaml"):
        path.write_text("edited: after submission\n")
    submitter.wait()
    (tmp_path / "alone").mkdir()
    alone = drawn_alone(tmp_path / "alone", *points)
    together = [records_of(path.parent) for path in sorted((tmp_path / "outputs").rglob("run.json"))]
    assert [without_times(records) for records in together] == [without_times(records) for records in alone]
    assert len(together) == 5
    assert {state.word for state in _states(Submitter(slurm, tmp_path)).values()} == {"completed"}
    assert all(events == ["started", "complete"] for events in submitter.events().values())


def _states(submitter: Submitter) -> dict[str, __main__.State]:
    """The states that `status` reports, as soon as the accounting is up to date."""
    def settled() -> dict[str, __main__.State] | None:
        previous = os.environ.get("SLURM_CONF"), os.environ["PATH"]
        os.environ.update({"SLURM_CONF": submitter.cluster.environment["SLURM_CONF"],
                           "PATH": submitter.cluster.environment["PATH"]})
        try:
            found = __main__.states(submitter.grid())
        finally:
            os.environ["PATH"] = previous[1]
            os.environ.pop("SLURM_CONF") if previous[0] is None else os.environ.update({"SLURM_CONF": previous[0]})
        return found if not any(state.live for state in found.values()) else None

    return submitter.cluster.wait_until(settled, "accounting")


def test_a_signal_and_a_kill_lose_nothing(submitter, reference):
    """One job gets SIGUSR1 and is requeued. The worker of the other job is killed and started again."""
    grid = submitter.submit(*LONG, "shards=2")
    submitter.wait_for_records(3)
    submitter.cluster.run("scancel", "--signal=USR1", grid.jobs[0].id)
    worker_of(submitter, 1).send_signal(signal.SIGKILL)
    submitter.cluster.wait_until(lambda: "requeued" in submitter.events()["0000-0"], "the requeue")
    submitter.wait()
    check_complete(submitter, reference)
    events = submitter.events()
    assert events["0000-0"] == ["started", "requeued", "started", "complete"]
    assert events["0000-1"] == ["started", "died", "complete"]


def test_a_job_on_a_crashed_node_is_resumed_on_another_node(submitter, reference):
    grid = submitter.submit(*LONG)
    submitter.wait_for_records(3)
    (job,) = [job for job in submitter.cluster.jobs() if job.id == grid.jobs[0].id]
    submitter.cluster.kill_node(job.node)
    submitter.wait()
    check_complete(submitter, reference)
    nodes = [event["node"] for event in grid.events(grid.jobs[0]) if event["event"] == "started"]
    assert len(nodes) == 2
    assert nodes[1] != nodes[0] == job.node


def test_a_cancelled_grid_is_resumed_with_the_missing_samples(submitter, reference):
    grid = submitter.submit(*LONG, "shards=2")
    submitter.wait_for_records(3)
    assert "2 jobs cancelled" in submitter.run("cancel").stdout
    submitter.wait()
    assert [events for events in submitter.events().values()] == [["started", "stopped"]] * 2
    done = len(submitter.records()[0])
    _states(submitter)
    shown = submitter.run("status").stdout
    assert f"{done}" in shown
    assert f"{len(reference) - done:,} samples have no job" in shown
    assert "1 job " in submitter.run("resume", "shards=1").stdout
    assert len(submitter.grid().jobs) == 3
    assert "nothing is missing" in submitter.run("resume").stdout
    submitter.wait()
    check_complete(submitter, reference)
    assert "already complete" in submitter.run("submit", *LONG).stdout
    assert grid.folder == submitter.grid().folder


def test_two_processes_in_a_job(submitter, reference):
    """The processes are started by accelerate. If one is killed, accelerate ends the launch, and the job starts it again."""
    grid = submitter.submit(*LONG, "processes=2", "cpus=2", "memory_gb=3")
    submitter.wait_for_records(3)
    worker_of(submitter, 0).send_signal(signal.SIGKILL)
    submitter.wait()
    check_complete(submitter, reference)
    assert submitter.events()["0000-0"] == ["started", "died", "complete"]
    assert len(list(Path(grid.points[0].folder).glob("records*.jsonl"))) >= 2


def test_data_that_changes_after_submission_is_refused_and_reported(submitter):
    tasks = submitter.folder / "tasks.jsonl"
    tasks.write_text('{"id": "a", "question": "How much is 1 + 1?", "answer": "2"}\n')
    submitter.submit("dataset=jsonl", "dataset.path=tasks.jsonl", "sampler=greedy", *SHORT, "setup=[sleep 3]")
    tasks.write_text('{"id": "a", "question": "How much is 1 + 2?", "answer": "3"}\n')
    submitter.wait()
    _states(submitter)
    shown = submitter.run("status").stdout
    assert "failed 2:0" in shown
    assert "failed: the content of model, draft or dataset has changed since the grid was submitted" in shown
    assert submitter.events()["0000-0"] == ["started", "failed"]
    assert submitter.records() == [[]]


def test_a_folder_that_a_node_cannot_read_is_reported(submitter):
    """The folder is missing when the job starts, and exists again when the status is requested."""
    submitter.cluster.run("scontrol", "update", "partition=main", "state=down")
    grid = submitter.submit("sampler=greedy", "dataset.limit=2", *SHORT)
    away = grid.folder.with_name("away")
    grid.folder.rename(away)
    submitter.cluster.run("scontrol", "update", "partition=main", "state=up")
    submitter.cluster.wait_until(lambda: submitter.cluster.state(grid.jobs[0].id) == "FAILED", "the job to fail")
    away.rename(grid.folder)
    _states(submitter)
    assert f"it has noted no event; check that its node can read {grid.folder}" in submitter.run("status").stdout


def test_a_preempted_job_is_requeued_and_resumed(submitter, reference):
    """A job of the partition with higher priority gets all nodes after 10 seconds of grace."""
    grid = submitter.submit(*LONG, "hardware.grace_seconds=2")
    submitter.wait_for_records(3)
    submitter.cluster.submit("sleep 2", "--partition=high", "--nodes=4", "--exclusive", "--time=1")
    submitter.cluster.wait_until(lambda: submitter.events()["0000-0"].count("started") == 2, "the second start")
    submitter.wait()
    check_complete(submitter, reference)
    assert submitter.events()["0000-0"] == ["started", "requeued", "started", "complete"]
    assert [event["reason"] for event in grid.events(grid.jobs[0]) if event["event"] == "requeued"] == ["SIGUSR1"]


def test_a_killed_supervisor_is_started_again_by_the_jobs_shell(submitter, reference):
    submitter.submit(*LONG)
    submitter.wait_for_records(3)
    worker_of(submitter, 0).parent().send_signal(signal.SIGKILL)
    submitter.cluster.wait_until(lambda: submitter.events()["0000-0"] == ["started", "started"], "the second start")
    submitter.wait()
    check_complete(submitter, reference)
