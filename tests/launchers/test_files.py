"""The files of `launchers/`, each run with the embedded model as described in its first lines."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dflash_mcmc.components import name_of
from dflash_mcmc.config.command import check_command
from dflash_mcmc.errors import UserError
from dflash_mcmc.store.files import from_line
from tests.conftest import ROOT
from tests.launchers.sweep_server import SweepServer
from tests.launchers.test_sweep_agent import BIN, make_sweep
from tests.processes import HANG, wait_until
from tests.runs import execute

FILES = ROOT / "launchers"
SLOW = ("condition=ps", "sampler.num_blocks=2", "hardware.num_slots=2", "hardware.device=cpu")
"""Options of a run that takes long enough to be stopped before its end."""


def environment(**more: str) -> dict[str, str]:
    # The test's folder is not a checkout, so it has no .venv.
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, **more}


def records(folder: Path) -> list[dict]:
    return [from_line(line) for path in sorted(folder.glob("records*.jsonl")) for line in path.read_bytes().splitlines()]


def samples(folder: Path) -> list[tuple]:
    """The sample data of each record, sorted. Repeated records stay repeated."""
    return sorted((record["problem"], record["chain"], record["text"], record["log_p"]) for record in records(folder))


@pytest.mark.parametrize("path", sorted(FILES.glob("*.sbatch")), ids=lambda path: path.name)
def test_shell_syntax(path):
    subprocess.run(["bash", "-n", path], check=True)
    checker = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    if checker is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([checker, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_accelerate_reads_its_file():
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(FILES / "accelerate.yaml"))
    assert (config.num_processes, config.distributed_type) == (8, "MULTI_GPU")
    assert (FILES / "accelerate.yaml").read_text().startswith("# accelerate launch --config_file launchers/accelerate.yaml ")


def start_local(folder: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, FILES / "local.py", "--processes", "2", *arguments], cwd=folder, text=True,
                            env={**os.environ, **environment()}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_local_prints_one_table_and_fails_if_a_point_fails(tmp_path):
    """A line of the second point's records is damaged."""
    short = "experiment=demo", "condition=greedy", "dataset.max_new_tokens=16"
    with start_local(tmp_path, *short, "dataset.limit=1", "seed=1") as program:
        program.communicate(timeout=HANG)
    (damaged,) = (tmp_path / "outputs/demo").glob("greedy-*")
    with (damaged / "records.jsonl").open("a") as file:
        file.write("[1]\n")
    with start_local(tmp_path, "-m", *short, "dataset.limit=4", "seed=0,1") as program:
        output, errors = program.communicate(timeout=HANG)
    assert program.returncode == 2, errors
    assert output.count("| condition ") == 1
    assert "2 jobs: 1 done now, 0 already complete, 1 failed" in output
    assert errors.count("failed: seed=1: ") == 1
    (folder,) = set((tmp_path / "outputs/demo").glob("greedy-*")) - {damaged}
    assert len(samples(folder)) == len({record["problem"] for record in records(folder)}) == 4


@pytest.mark.slow
def test_local_continues_without_a_killed_process_and_stops_gracefully(tmp_path):
    with start_local(tmp_path, "experiment=demo", "dataset.limit=100", *SLOW) as program:
        wait_until(lambda: [line for path in tmp_path.glob("outputs/demo/*/records*.jsonl") for line in path.open()])
        (second,) = [child for child in psutil.Process(program.pid).children() if child.environ().get("RANK") == "1"]
        second.kill()
        wait_until(lambda: not second.is_running() or second.status() == psutil.STATUS_ZOMBIE)
        (folder,) = (tmp_path / "outputs/demo").glob("power_mh-*")
        before = len(records(folder))
        wait_until(lambda: len(records(folder)) > before)
        program.send_signal(signal.SIGUSR1)
        _, errors = program.communicate(timeout=HANG)
    assert program.returncode == 143, errors
    assert "process 1 died of SIGKILL; the others draw its share" in errors
    assert "stopped by SIGUSR1" in errors
    assert before < len({record["problem"] for record in records(folder)}) == len(records(folder)) < 100


@pytest.mark.parametrize(("arguments", "complaint"), [
    pytest.param(["--processes", "0"], "--processes: given 0; allowed: at least 1", marks=pytest.mark.slow),
    pytest.param(["--processes", "all"], "argument --processes: invalid int value: 'all'; see local.py --help",
                 marks=pytest.mark.slow),
    (["--processes", "2", "experiment=dmo"], "experiment: unknown option 'dmo'"),
])
def test_local_reports_a_bad_command_line_once(tmp_path, arguments, complaint):
    done = subprocess.run([sys.executable, FILES / "local.py", *arguments], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, **environment()}, timeout=HANG)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {complaint}")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_local_starts_a_process_for_each_group_of_gpus(monkeypatch):
    spec = importlib.util.spec_from_file_location("local_launcher", FILES / "local.py")
    local = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(local)
    monkeypatch.setattr(local, "_num_gpus", lambda: 8)
    for overrides, expected in (((), 8), (("engine=vllm", "engine.tensor_parallel_size=2"), 4)):
        assert local._num_groups(check_command(overrides).jobs) == expected
    with pytest.raises(UserError, match="given 16; allowed: at most 8, the GPUs of this machine"):
        local._num_groups(check_command(["engine=vllm", "engine.pipeline_parallel_size=16"]).jobs)


def submit(slurm, folder: Path, options: list[str], file: str, *arguments: str, **more: str) -> str:
    """Submits a file and returns the number of the job."""
    variables = [f"{name}={value}" for name, value in environment(**more).items()]
    # These options replace those of the file, which are for a real cluster.
    small = ["--cpus-per-task=1", "--mem=4G", "--parsable", "--partition=main"]
    return slurm.run("env", *variables, "sbatch", *small, *options, str(FILES / file), *arguments, cwd=folder).stdout.strip()


def test_phases(slurm, tmp_path):
    job = submit(slurm, tmp_path, ["--ntasks=2", "--gpus-per-task=0"], "phases.sbatch", "dataset.limit=2",
                 "dataset.max_new_tokens=16", EXPERIMENT="demo")
    slurm.wait_until(lambda: slurm.states(job) == ["COMPLETED"])
    table, _, page = (tmp_path / f"slurm-phases-{job}.out").read_text().rpartition("| condition ")[2].rpartition("\n\n")
    for condition in ("greedy", "temp", "blend_greedy", "ps", "blend_ps", "draft_blend_ps"):
        assert f"\n| {condition} " in table
    assert Path(page.strip()).is_file()
    runs = list((tmp_path / "outputs/demo").glob("*-arith-*"))
    assert len(runs) == 6
    assert {len(samples(run)) for run in runs} == {2}


@pytest.mark.slow
def test_each_condition_takes_the_arguments_of_the_document(tmp_path):
    """`sampler.alpha` and `blend.beta` are left out where a condition lacks them. A stand-in for srun writes its arguments."""
    stand_in = tmp_path / "srun"
    stand_in.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" END >> {tmp_path}/given\n")
    stand_in.chmod(0o755)
    own = ["sampler.alpha=8", "sampler.num_steps=3", "blend.beta=0.1", "dataset.limit=2", "model=tiny", "dataset=arith"]
    done = subprocess.run(["bash", str(FILES / "phases.sbatch"), *own], text=True, capture_output=True, timeout=HANG, env={
        **os.environ, **environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1",
        "EXPERIMENT": "demo"})
    assert done.returncode == 0, done.stderr
    drawn, _ = (tmp_path / "given").read_text().split("END\n")[:-1]
    jobs = check_command(["-m", *drawn.partition(f"{sys.executable}\n")[2].splitlines()]).jobs
    assert [job.config.condition.name for job in jobs] == [
        "greedy", "temp", "blend_greedy", "ps", "blend_ps", "draft_blend_ps"]
    assert [name_of(job.config.draft) for job in jobs] == [*["none"] * 5, "dflash"]
    assert {job.config.sampler.alpha for job in jobs[3:]} == {8.0}
    assert [job.config.blend.beta for job in jobs if hasattr(job.config.blend, "beta")] == [0.1] * 3


def test_a_signalled_task_of_an_array_is_resumed(slurm, tmp_path, make_config):
    arguments = ["experiment=demo", "dataset.limit=24", *SLOW]
    job = submit(slurm, tmp_path, ["--array=0-1", "--gpus=0"], "array.sbatch", *arguments)
    wait_until(lambda: [line for path in tmp_path.glob("outputs/demo/*/records*.jsonl") for line in path.open()])
    slurm.run("scancel", "--signal=USR1", f"{job}_0")
    slurm.wait_until(lambda: slurm.states(f"{job}_0") == ["REQUEUED", "COMPLETED"])
    slurm.wait_until(lambda: slurm.states(f"{job}_1") == ["COMPLETED"])
    (folder,) = (tmp_path / "outputs/demo").glob("power_mh-*")
    alone = execute(make_config(f"paths.outputs={tmp_path}/alone", *arguments))
    assert samples(folder) == samples(alone.folder)
    assert json.loads((folder / "summary.json").read_text())["num_samples"] == 24


def test_a_preempted_agent_resumes_its_run(slurm, tmp_path):
    with SweepServer() as server:
        name, more = make_sweep(server, tmp_path, ["dataset.limit=24", *SLOW[1:]], alpha=[2], beta=[0.1])
        wandb = {key: value for key, value in more.items() if key.startswith("WANDB_")}
        job = submit(slurm, tmp_path, ["--array=0-0", "--gpus=0"], "agent.sbatch", name, **wandb)
        wait_until(lambda: ("dflash_mcmc", "sweep1-0") in server.runs and server.run("sweep1-0").lines)
        slurm.run("scancel", "--batch", "--signal=USR1", f"{job}_0")
        slurm.wait_until(lambda: slurm.states(f"{job}_0") == ["REQUEUED", "COMPLETED"])
        run = server.run("sweep1-0")
        assert server.preempted == ["sweep1-0"]
        assert len(server.runs) == 1
        assert [row["finished"] for row in run.history if "sample/log_p" in row] == list(range(1, 25))
        assert run.exit_code == 0
        assert server.unknown == []
