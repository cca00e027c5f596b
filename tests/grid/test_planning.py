"""What a grid's points lack, and how many jobs that takes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mcmc.config import command as cli
from dflash_mcmc.config.identity import hash_of, identity_hash, identity_of, run_folder
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.errors import UserError
from dflash_mcmc.grid import snapshot, submission, work
from dflash_mcmc.grid.folder import Grid
from dflash_mcmc.process.stopping import Stopped
from dflash_mcmc.runner.loop import readable_name, tags
from dflash_mcmc.store.files import to_line
from dflash_mcmc.types import RunResult
from tests import processes
from tests.test_names import PLUGIN, install

BASE = ("-m", "tracker=none", "dataset.limit=4")


def planned(*arguments: str, outputs) -> list[submission.Planned]:
    cli.prepare()
    command = cli.check_command([*BASE, f"paths.outputs={outputs}", *arguments])
    return submission.plan(command.jobs)


def lay(folder, *keys, torn: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [to_line({"problem": problem, "chain": chain, "verdict": verdict, "share_seconds": 2.0}).decode()[:-1]
             for problem, chain, verdict in keys]
    (folder / "records.1.jsonl").write_text("\n".join([*lines, torn]))


def test_points_are_those_of_the_sweep_with_what_differs_as_label(tmp_path):
    points = planned("condition=greedy,ps", "seed=1,2", outputs=tmp_path)
    assert [each.point.label for each in points] == ["greedy seed=1", "greedy seed=2", "ps seed=1", "ps seed=2"]
    assert len({each.point.folder for each in points}) == 4
    assert [point.num_pending for point in points] == [4, 4, 4, 4]
    assert {point.job.choices["condition"] for point in points} == {"greedy", "ps"}


def test_points_that_come_to_one_run_are_one_and_the_larger_counts(tmp_path):
    points = planned("condition=greedy", "sampler.alpha=1,2,3", outputs=tmp_path)
    assert [each.point.num_asked for each in points] == [4]
    points = planned("condition=ps", "num_chains=1,3,2", outputs=tmp_path)
    assert [(each.point.label, each.point.num_asked) for each in points] == [("ps num_chains=3", 12)]


def test_what_is_recorded_is_not_pending(tmp_path):
    (point,) = planned("condition=ps", "num_chains=2", outputs=tmp_path)
    first, second, *_ = sorted(point.asked)
    lay(Path(point.point.folder), (*first, "correct"), (*second, "not_drawn"), ("of another", 0, "wrong"),
        torn=json.dumps({"problem": "torn", "chain": 0})[:-1])
    (again,) = planned("condition=ps", "num_chains=2", outputs=tmp_path)
    assert (again.point.num_asked, again.num_pending) == (8, 6)
    recorded = submission.recorded(Path(point.point.folder))
    assert recorded.share_seconds == 2.0
    assert list(recorded.verdicts.values()).count("not_drawn") == 1


def test_the_rate_follows_what_was_drawn_lately(tmp_path):
    """Fifty samples of each process that still records; a file that stopped growing hours ago tells of another job."""
    def write(name: str, shares: list[float], hours_ago: float) -> None:
        path = tmp_path / name
        path.write_text("".join(to_line({"problem": f"{name} {number}", "chain": 0, "share_seconds": share}).decode()
                                for number, share in enumerate(shares)))
        os.utime(path, (at := path.stat().st_mtime - 3600 * hours_ago, at))

    write("records.jsonl", [100.0] * 20 + [3.0] * 50, hours_ago=0)
    write("records.1.jsonl", [1.0] * 50, hours_ago=0.9)
    write("records.2.jsonl", [500.0] * 50, hours_ago=1.1)
    assert submission.recorded(tmp_path).share_seconds == 2.0


def test_a_corrupt_record_is_told(tmp_path):
    (tmp_path / "records.jsonl").write_bytes(to_line({"chain": 0}))
    with pytest.raises(UserError, match=r"records\.jsonl: line 1: problem: given nothing; allowed: a value"):
        submission.recorded(tmp_path)


def test_units_of_a_probe_are_planned(tmp_path):
    (point,) = planned("probe=layer_rank", outputs=tmp_path)
    assert point.num_pending == point.point.num_asked == len(point.job.config.probe.units(point.job.config))


LARGE = """
import re, sys, time
started = time.perf_counter()
from dflash_mcmc.config import command as cli
from dflash_mcmc.grid import submission
cli.prepare()
command = cli.check_command(["-m", "dataset=jsonl", "dataset.path=tasks.jsonl", "condition=ps", "num_chains=8"])
print(sum(point.num_pending for point in submission.plan(command.jobs)),
      int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) // 1000,
      "torch" in sys.modules, "transformers" in sys.modules)
print(time.perf_counter() - started, file=sys.stderr)
"""


@pytest.mark.slow
def test_a_large_grid_is_planned_in_little_memory_without_the_models_libraries(tmp_path):
    """10,000 problems x 8 chains below 200 MB."""
    with (tmp_path / "tasks.jsonl").open("w") as file:
        for number in range(10_000):
            task = {"id": str(number), "question": f"How much is {number} + 1?", "answer": str(number + 1)}
            file.write(to_line(task).decode())
    done = subprocess.run([sys.executable, "-c", LARGE], cwd=tmp_path, capture_output=True, text=True, check=True)
    print(done.stdout, done.stderr)
    pending, megabytes, torch, transformers = done.stdout.split()
    assert pending == "80000"
    assert int(megabytes) < 200
    assert (torch, transformers) == ("False", "False")


def test_a_run_that_lacks_nothing_but_its_summary_takes_one_job(tmp_path):
    """Its last process was killed behind the last record."""
    (point,) = planned("condition=ps", outputs=tmp_path)
    folder = Path(point.point.folder)
    lay(folder, *((*key, "correct") for key in sorted(point.asked)))
    assert planned("condition=ps", outputs=tmp_path)[0].num_pending == 1
    for summary, pending in (("", 1), ('{"num_samples": 3}', 1), ('{"num_samples": 4}', 0)):
        (folder / "summary.json").write_text(summary)
        assert planned("condition=ps", outputs=tmp_path)[0].num_pending == pending
    (folder / "records.1.jsonl").rename(folder / "records.old.jsonl")  # moved away to begin anew
    assert planned("condition=ps", outputs=tmp_path)[0].num_pending == 4


# What jobs run is what was submitted: configurations come back whole, and later edits are without effect.

TASK = '{"id": "a", "question": "How much is 1 + 1?", "answer": "2"}\n'


def test_relative_paths_mean_the_same_elsewhere(make_config, tmp_path, monkeypatch):
    """A job starts in another folder. `grader.model` is a name of an endpoint, even where a folder has it."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("tasks.jsonl", TASK), ("shots.jsonl", TASK.replace("1 + 1", "3 + 3")), ("prompt.txt", "{question}")):
        (tmp_path / name).write_text(text)
    (tmp_path / "mine").mkdir()
    config = make_config("paths.outputs=out", "dataset=jsonl", "dataset.path=tasks.jsonl", "sampler=greedy", "tracker=wandb",
                         "dataset.prompt_file=prompt.txt", "dataset.fewshot=1", "dataset.fewshot_path=shots.jsonl",
                         "grader=judge", "grader.url=http://127.0.0.1:9/v1", "grader.model=mine")
    snapshot.write_point(tmp_path / "point.yaml", config, tmp_path / "code")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / PACKAGE.name).symlink_to(PACKAGE)
    monkeypatch.chdir(tmp_path / "elsewhere")
    back = snapshot.read_point(tmp_path / "point.yaml")
    assert back.paths.outputs == back.tracker.folder == str(tmp_path / "out")
    for field, name in (("path", "tasks.jsonl"), ("fewshot_path", "shots.jsonl"), ("prompt_file", "prompt.txt")):
        assert getattr(back.dataset, field) == str(tmp_path / name)
    assert back.grader.model == "mine"
    assert back.model.path.startswith(str(tmp_path / "code"))
    monkeypatch.chdir(tmp_path)
    digest = identity_hash(config)
    snapshot.check_identity(back, digest)
    (tmp_path / "tasks.jsonl").write_text(TASK.replace("1 + 1", "2 + 0"))
    with pytest.raises(UserError, match="has changed since the grid was submitted"):
        snapshot.check_identity(back, digest)


def test_the_copy_is_complete_and_comes_before_the_checkout(tmp_path):
    """A process in the checkout, with the checkout on its path, runs the copy, and composes with the copy's conf."""
    snapshot.copy_code(tmp_path / "code")
    assert not list((tmp_path / "code").rglob("__pycache__"))
    root = cli.config_folder().parent
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'code'}:{root}", "PYTHONSAFEPATH": "1"}
    code = "import dflash_mcmc.config.command as c; c.prepare(); print(c.__file__, c.config_folder())"
    shown = subprocess.run([sys.executable, "-c", code],
                           cwd=root, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert all(path.startswith(str(tmp_path / "code")) for path in shown)
    copied = {path.relative_to(tmp_path / "code" / "conf") for path in (tmp_path / "code" / "conf").rglob("*.yaml")}
    assert copied == {path.relative_to(cli.config_folder()) for path in cli.config_folder().rglob("*.yaml")}
    done = subprocess.run([sys.executable, "-m", "dflash_mcmc.grid.work", str(tmp_path), "0"], cwd=root, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "grid.json: cannot be read" in done.stderr


@pytest.mark.slow
def test_a_run_of_the_copy_names_the_commit_that_was_submitted(tmp_path):
    from dflash_mcmc.runner.loop import commit

    snapshot.copy_code(tmp_path / "code")
    program = ("from dflash_mcmc.config import schema; from dflash_mcmc.runner import loop; "
               "print(schema.PACKAGE.parent, loop.commit()['commit'])")
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(tmp_path / "code")},
                          cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "code"), str(commit()["commit"])]


@pytest.mark.slow
def test_a_plugin_is_copied_with_its_entry_points(tmp_path):
    """A package and a module, of which only the package is an entry point. The original is gone when the copy is used."""
    plugin, code = tmp_path / "plugin", tmp_path / "code"
    plugin.mkdir()
    install(plugin, PLUGIN)
    content = (plugin / "elsewhere.py").read_text()
    (plugin / "elsewhere.py").unlink()
    (plugin / "elsewhere").mkdir()
    (plugin / "elsewhere" / "__init__.py").write_text(content)
    (plugin / "beside.py").write_text("")
    (plugin / "elsewhere-1.0.dist-info" / "top_level.txt").write_text("elsewhere\nbeside\ngone\n")
    run_with(plugin, "from dflash_mcmc.grid.snapshot import copy_code; from pathlib import Path\n"
                     f"copy_code(Path({str(code)!r}))")
    shutil.rmtree(plugin)
    shown = run_with(code, "import beside; from dflash_mcmc import components; print(beside.__file__)\n"
                           "print(components.registered('sampler')['elsewhere'].file)").split()
    assert shown == [str(code / "beside.py"), str(code / "elsewhere" / "__init__.py")]


def run_with(folder, program: str) -> str:
    """The output of a program that finds the modules of a folder."""
    done = processes.run(["-c", program], folder, PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


# A worker: its point as its command would run it, and an end that its supervisor understands.

@pytest.fixture
def grid(make_grid, tmp_path) -> Grid:
    """Of `condition=ps,temp sampler.alpha=2 dataset.limit=3`."""
    grid = make_grid()
    command = cli.check_command(["-m", "condition=ps", "sampler.alpha=2,3", "dataset.limit=3", "tracker=none",
                                 "hardware=slurm_cpu", f"paths.outputs={tmp_path}"])
    planned = submission.plan(command.jobs)
    (grid.folder / "code").unlink()
    snapshot.copy_code(grid.folder / "code")
    for number, point in enumerate(planned):
        snapshot.write_point(grid.point_file(number), point.job.config, grid.folder / "code")
    grid.points = [each.point for each in planned]
    grid.save()
    return grid


@pytest.fixture
def executed(monkeypatch):
    """Replaces the run: remembers the jobs and raises what a test asks for."""
    jobs = []

    def execute(job):
        jobs.append(job)
        if execute.error:
            raise execute.error
        config = job.config
        return RunResult(run_folder(config, hash_of(identity_of(config))), {}, 3, 0, 0)

    execute.error, execute.jobs = None, jobs
    monkeypatch.setattr("dflash_mcmc.runner.loop.execute", execute)
    monkeypatch.setattr(work, "die_with_parent", lambda: None)  # it would be that of the tests
    return execute


def ended(grid: Grid, point: int) -> int:
    with pytest.raises(SystemExit) as stopped:
        work.main([str(grid.folder), str(point)])
    return stopped.value.code


def test_the_point_is_run_under_the_name_of_its_command(grid, executed):
    assert ended(grid, 1) == 0
    (job,) = executed.jobs
    config = job.config
    assert config.sampler.alpha == 3
    assert config.model.path.startswith(str(grid.folder / "code"))
    assert readable_name(job) == "ps alpha=3"
    assert "model=tiny" in tags(job)
    assert str(run_folder(config, hash_of(identity_of(config)))) == grid.points[1].folder


@pytest.mark.slow
@pytest.mark.parametrize(("error", "code"), [(None, 0), (UserError("no room"), 2), (Stopped("SIGUSR1"), 143)])
def test_the_end_of_one_process_and_of_those_of_a_launch(grid, executed, tmp_path, monkeypatch, error, code):
    executed.error = error
    assert ended(grid, 0) == code
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("DFLASH_MCMC_ENDINGS", str(tmp_path / "endings"))
    assert ended(grid, 0) == 0
    assert (tmp_path / "endings").read_text() == f"{code}\n"


def test_a_process_of_a_launch_that_breaks_says_so_to_the_launcher(grid, executed, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    executed.error = ValueError("broken")
    with pytest.raises(ValueError, match="broken"):
        work.main([str(grid.folder), "0"])
