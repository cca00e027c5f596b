"""From a command line to what SLURM is asked for; what cannot be is one line and leaves nothing."""

import json
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from dflash_mcmc.__main__ import main
from dflash_mcmc.grid import snapshot, submission
from dflash_mcmc.grid.__main__ import main as grid_main
from dflash_mcmc.grid.folder import Grid, find
from dflash_mcmc.store.files import to_line
from tests.runner.test_tracking import SECRETS, found_in

POINTS = ("condition=greedy,temp", "dataset.limit=4", "tracker=none")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ended(*arguments: str, program=grid_main) -> int:
    with pytest.raises(SystemExit) as stopped:
        program(list(arguments))
    return stopped.value.code


@pytest.fixture
def submitted(slurm_commands, tmp_path, capsys):
    """The grid of `submit` with these arguments."""
    def submit(*arguments: str, program=grid_main) -> Grid:
        first = ("-m",) if program is main else ("submit",)
        assert ended(*first, *POINTS, *arguments, program=program) == 0
        return find([], tmp_path / "outputs")[0]

    return submit


def batch_of(grid: Grid, job: str = "7") -> str:
    return (grid.folder / "logs" / f"{job}_submission.sh").read_text()


@pytest.mark.slow
def test_a_job_has_a_process_for_each_group_of_gpus(submitted):
    grid = submitted("engine=vllm", "gpus=8", "engine.tensor_parallel_size=2,4", "engine.pipeline_parallel_size=1")
    assert grid.launcher.num_processes == 2
    assert ended("submit", *POINTS, "engine=vllm", "gpus=2", "engine.tensor_parallel_size=4") == 2


@pytest.mark.slow
def test_a_job_for_each_point_and_shard(submitted, tmp_path, capsys):
    grid = submitted("shards=3")
    assert [(job.id, job.point, job.shard, job.shards) for job in grid.jobs] == [
        (f"7_{3 * point + shard}", point, shard, 3) for point in range(2) for shard in range(3)]
    told = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in told[2:5]] == ["greedy", "temp", "total"]
    assert told[-2:] == [f"{grid.folder.relative_to(tmp_path)}: 6 jobs for 8 samples of 2 points: 7_0 to 7_5",
                         f"python -m dflash_mcmc.grid status {grid.folder.relative_to(tmp_path)}"]
    assert [point.label for point in grid.points] == ["greedy", "temp"]
    assert grid.folder.parent == tmp_path / "outputs" / "default" / "grids"
    supervisor = pickle.loads((grid.folder / "logs" / "7_4_submitted.pkl").read_bytes()).function
    assert (supervisor.folder, supervisor.token, supervisor.point, supervisor.shard) == (str(grid.folder), grid.token, 1, 1)


@pytest.mark.slow
def test_a_disk_that_is_full_at_submission_is_one_line_and_leaves_nothing(slurm_commands, tmp_path, capsys, monkeypatch):
    def full(source, target, **given):
        raise shutil.Error([(source, target, "[Errno 28] No space left on device")])

    monkeypatch.setattr(snapshot.shutil, "copytree", full)
    assert ended("submit", *POINTS) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: paths.outputs: cannot write to ")
    assert line.endswith("/code: [Errno 28] No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("job", "requeued"), [({"SLURM_JOB_ID": "9"}, "9"), ({
    "SLURM_JOB_ID": "4", "SLURM_ARRAY_JOB_ID": "4", "SLURM_ARRAY_TASK_ID": "2"}, "4_2")])
def test_a_killed_supervisor_requeues_its_own_task(job, requeued):
    """The last task of an array has the id of the whole array as SLURM_JOB_ID."""
    script = "\n".join(["scontrol() { echo $*; }", "(exit 137)", *submission._again(1)])
    done = subprocess.run(["bash", "-c", script], env=job, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (f"requeue {requeued}", 137)


def test_what_slurm_is_asked_for(submitted):
    grid = submitted("partition=high", "account=lab", "qos=long", "gpus=2", "cpus=6", "memory_gb=40", "minutes=90",
                     "array_parallelism=2", "grace_seconds=100", "setup=[module load cuda,source env/bin/activate]",
                     "python=apptainer exec image.sif python")
    lines = batch_of(grid).splitlines()
    for option in ("partition=high", "account=lab", "qos=long", "gpus-per-node=2", "cpus-per-task=6", "mem=40000M", "time=90",
                   "nodes=1", "array=0-1%2", "signal=USR1@100", "requeue", "job-name=default"):
        assert f"#SBATCH --{option}" in lines
    assert lines.index("module load cuda") < lines.index("source env/bin/activate") < next(
        number for number, line in enumerate(lines) if line.startswith(f"export PYTHONPATH={grid.folder / 'code'}"))
    assert any("apptainer exec image.sif python -u -m submitit" in line for line in lines)
    assert yaml.safe_load(grid.point_file(1).read_text())["condition"]["name"] == "temp"


@pytest.mark.slow
def test_the_folder_of_a_grid_has_no_secret(submitted, tmp_path, monkeypatch):
    """Neither the submission, nor the pickled jobs, nor the snapshot has what is in the environment."""
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    grid = submitted("tracker=wandb", "grader=judge", "grader.url=http://127.0.0.1:9", "grader.model=none",
                     "grader.api_key_env=DFLASH_TEST_JUDGE_KEY")
    assert list(grid.folder.rglob("*_submitted.pkl"))
    assert found_in(tmp_path) == []


@pytest.mark.parametrize(("arguments", "jobs", "arrays"), [
    pytest.param(["shards=100"], 8, 1, marks=pytest.mark.slow), (["condition=temp"], 1, 0),  # no array of one job
    pytest.param(["shards=4"], 8, 3, marks=pytest.mark.slow),
    (["dataset.limit=100", "num_chains=6", "shards=501", "confirm=true"], 1002, 2)])
def test_the_number_of_jobs_and_of_arrays(submitted, slurm_commands, arguments, jobs, arrays):
    if arrays == 3:
        slurm_commands.answer("scontrol-config", "MaxArraySize            = 4\n")
    grid = submitted(*arguments)
    assert len(grid.jobs) == jobs
    assert len(slurm_commands.calls("sbatch")) == max(1, arrays)
    if not arrays:
        assert grid.jobs[0].id == "7"
        assert "--array" not in batch_of(grid)


@pytest.mark.slow
def test_multirun_is_the_same(submitted, tmp_path):
    one = submitted("hardware=slurm_cpu", "shards=2")
    two = submitted("hardware=slurm_cpu", "hydra.launcher.shards=2", program=main)
    assert one.folder != two.folder
    assert [(point.label, point.folder) for point in one.points] == [(point.label, point.folder) for point in two.points]
    assert [(job.point, job.shard) for job in one.jobs] == [(job.point, job.shard) for job in two.jobs]
    assert one.launcher == two.launcher


MISTAKES = {
    "partition": (["partition=mian"], ["hydra.launcher.partition", "'mian'", "did you mean 'main'"]),
    "grace": (["hardware.grace_seconds=110"], ["hardware.grace_seconds", "110", "at most 108"]),
    "too many": (["dataset.limit=100", "num_chains=20", "shards=1000"], ["2,000 jobs", "at most 1,000", "confirm=true"]),
    "no points": (["seed=range(1,1)"], ["error: the sweep: given no point; allowed: at least one value of everything"]),
    "sbatch": (["gpus=64"], ["error: hydra.launcher: given gpus=64 cpus=4 minutes=60; SLURM refuses these jobs: "
                             "Batch job submission failed: Node configuration is not available\n"]),
    "sinfo": ([], ["error: hydra/launcher: slurm needs a cluster, and sinfo finds no slurm.conf on this machine (SLURM_CONF, "
                   "or the folder of SLURM's configuration); allowed: a machine that submits to a cluster, or "
                   "hydra/launcher=basic, which runs here\n"]),
}


REFUSALS = {
    "sbatch": "sbatch: error: Batch job submission failed: Node configuration is not available\n",
    "sinfo": "sinfo: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\nsinfo: error: fetch_config: DNS SRV "
             "lookup failed\nsinfo: fatal: Could not establish a configuration source\n"}


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line_and_leave_nothing(slurm_commands, tmp_path, capsys, request, arguments, parts):
    refused = request.node.callspec.id if request.node.callspec.id in REFUSALS else None
    if refused:
        slurm_commands.refuse(refused, REFUSALS[refused])
    assert ended("submit", *POINTS, *arguments) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    for part in parts:
        assert part in told
    assert refused == "sbatch" or slurm_commands.calls("sbatch") == []
    assert list(tmp_path.iterdir()) == []


def test_without_slurm(no_slurm, tmp_path, capsys):
    assert ended("submit", *POINTS) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "sbatch is not on this machine" in told
    assert list(tmp_path.iterdir()) == []


def complete(grid: Grid, point: int, count: int) -> None:
    """Lays down so many records of a point, and their summary."""
    keys = sorted(submission.asked(snapshot.read_point(grid.point_file(point))))[:count]
    folder = Path(grid.points[point].folder)
    folder.mkdir(parents=True, exist_ok=True)
    records = [{"problem": problem, "chain": chain, "verdict": "wrong", "share_seconds": 3.0} for problem, chain in keys]
    (folder / "records.jsonl").write_bytes(b"".join(map(to_line, records)))
    (folder / "summary.json").write_text(json.dumps({"num_samples": count}))


@pytest.mark.slow
def test_a_complete_grid_submits_nothing(submitted, slurm_commands, capsys, tmp_path):
    grid = submitted()
    for point in range(2):
        complete(grid, point, 4)
    capsys.readouterr()
    assert ended("submit", *POINTS) == 0
    assert capsys.readouterr().out.endswith("\nalready complete, with 8 samples: all points; nothing is submitted\n")
    assert len(slurm_commands.calls("sbatch")) == 1
    assert len(list(grid.folder.parent.iterdir())) == 1


def test_resume_submits_what_is_missing_and_has_no_job(submitted, slurm_commands, capsys):
    grid = submitted("shards=2")
    complete(grid, 0, 1)
    slurm_commands.answer("squeue", "7_2|RUNNING\n7_0|COMPLETED\n7_1|FAILED\n")
    slurm_commands.answer("sbatch", "Submitted batch job 8\n")
    capsys.readouterr()
    assert ended("resume", "minutes=120") == 0
    assert "2 jobs for 3 samples of 1 point: 8_0 to 8_1" in capsys.readouterr().out
    assert [(job.id, job.point) for job in Grid.read(grid.folder).jobs[4:]] == [("8_0", 0), ("8_1", 0)]
    assert "#SBATCH --time=120" in batch_of(grid, "8")
    slurm_commands.answer("squeue", "7_2|RUNNING\n8_0|PENDING\n")
    assert ended("resume", str(grid.folder)) == 0
    assert "nothing is missing; 2 points have jobs" in capsys.readouterr().out
    complete(grid, 0, 4)
    complete(grid, 1, 4)
    slurm_commands.answer("squeue", "")
    assert ended("resume", "default") == 0
    assert capsys.readouterr().out.endswith("nothing is missing\n")


def test_cancel_ends_the_jobs_that_are_left(submitted, slurm_commands, capsys):
    submitted("shards=2")
    slurm_commands.answer("squeue", "7_2|RUNNING\n7_3|PENDING\n7_0|COMPLETED\n99|RUNNING\n")
    assert ended("cancel") == 0
    assert slurm_commands.calls("scancel") == ["scancel 7_2 7_3"]
    assert "2 jobs cancelled" in capsys.readouterr().out


@pytest.mark.slow
def test_a_failed_later_array_cancels_the_earlier_ones(slurm_commands, tmp_path, monkeypatch, capsys):
    slurm_commands.answer("scontrol-config", "MaxArraySize            = 4\n")
    script = (slurm_commands._folder / "sbatch")
    script.write_text(f'#!/bin/bash\n[ -f {slurm_commands._folder}/once ] && {{ echo "QOSMaxSubmitJob" >&2; exit 1; }}\n'
                      f'touch {slurm_commands._folder}/once; echo "Submitted batch job 7"\n')
    assert ended("submit", *POINTS, "shards=4") == 2
    assert "QOSMaxSubmitJob" in capsys.readouterr().err
    assert slurm_commands.calls("scancel") == ["scancel 7_0 7_1 7_2"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "part"), [
    (["stauts"], "invalid choice"), ([], "required"), (["status", "nowhere"], "nowhere: no grid"),
    (["status"], "no grid was submitted"), (["resume", "--outputs"], "--outputs"),
    (["cancel", "name=mine"], "cancel: given name=mine; allowed: names and folders of grids"),
])
def test_mistakes_of_looking_after_are_one_line(capsys, arguments, part):
    assert ended(*arguments) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert part in told
