"""A worker: its point as its command would run it, and an end that its supervisor understands."""

from __future__ import annotations

import pytest

from dflash_mcmc.config import command as cli
from dflash_mcmc.config.identity import hash_of, identity_of, run_folder
from dflash_mcmc.errors import UserError
from dflash_mcmc.grid import snapshot, submission, work
from dflash_mcmc.grid.folder import Grid, Point
from dflash_mcmc.process.stopping import Stopped
from dflash_mcmc.runner.tasks import RunResult
from dflash_mcmc.runner.tracking import readable_name, tags


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
    grid.points = [Point.of(point) for point in planned]
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
        return RunResult(run_folder(config, hash_of(identity_of(config))), {}, 3, 0)

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
