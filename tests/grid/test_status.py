"""What `status` shows: points from their records, jobs from SLURM or from what they have noted."""

import json
from pathlib import Path

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.grid import __main__, snapshot, submission
from dflash_mcmc.grid.folder import Grid, SlurmJob, find
from dflash_mcmc.store.files import to_line


@pytest.fixture
def grid(make_grid, make_config) -> Grid:
    """Two points of two shards, with 3 and 4 of 4 samples recorded."""
    grid = make_grid("shards=2", points=2)
    for number in range(2):
        config = make_config(f"seed={number}", "dataset.limit=4")
        (grid.folder / "code").unlink()
        snapshot.write_point(grid.point_file(number), config, grid.folder / "code")
        (grid.folder / "code").symlink_to(Path(__main__.__file__).parents[2])
        folder = Path(grid.points[number].folder)
        folder.mkdir(parents=True)
        keys = sorted(submission.asked(config))[: 3 + number]
        (folder / "records.jsonl").write_bytes(b"".join(to_line({
            "problem": problem, "chain": chain, "share_seconds": 30.0,
            "verdict": "not_drawn" if place == 0 else "correct"})
            for place, (problem, chain) in enumerate(keys)))
    grid.jobs = [SlurmJob(id=f"7_{number}", point=number // 2, shard=number % 2, shards=2) for number in range(4)]
    grid.save()
    return grid


@pytest.mark.parametrize(("name", "value", "message"), [
    ("points", [{}], "points.0.label: given {}"), ("points", 5, "points: given 5"), ("points", [], "has no points"),
    ("jobs", [{"id": 1}], "jobs.0.id: given 1"), ("launcher", {"cpus": "x"}, "launcher"), ("token", None, "token: given None"),
    ("name", json.loads("[" * 300 + "]" * 300), "recursion limit")])
def test_a_grid_file_of_a_wrong_shape_is_one_line(make_grid, name, value, message):
    path = make_grid().folder / "grid.json"
    good = json.loads(path.read_text())
    for content in (json.dumps({**good, name: value}), "{}", "[]", "[" * 100_000):
        path.write_text(content)
        with pytest.raises(UserError, match=message if content.startswith('{"') else "grid.json: ") as error:
            Grid.read(path.parent)
        assert len(str(error.value).splitlines()) == 1


def rows(shown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines() if line.startswith("| seed")]


def lines(shown: str) -> list[str]:
    return [line for line in shown.splitlines()[1:] if line and not line.startswith("|")]


def test_running_jobs_and_their_rate(grid, slurm_commands):
    slurm_commands.answer("squeue", "7_0|RUNNING\n7_1|RUNNING\n")
    slurm_commands.answer("sacct", "7_2|COMPLETED|0:0|n1\n7_3|COMPLETED|0:0|n2\n")
    shown = __main__.table(grid)
    # Each of two processes draws a sample in 30 s; one is left.
    assert rows(shown) == [["seed=0", "3", "1", "1", "2 running", "4.0", "0:00:15"],
                           ["seed=1", "4", "0", "1", "2 completed", "-", "-"]]
    assert lines(shown) == []


def test_failed_jobs_are_told_with_their_reason(grid, slurm_commands):
    grid.note(grid.jobs[0], "started")
    grid.note(grid.jobs[0], "failed", "dataset.path: given nothing")
    log = grid.log_file(grid.jobs[0])
    log.parent.mkdir(exist_ok=True)
    log.write_text("a traceback")
    slurm_commands.answer("sacct", "7_0|FAILED|2:0|n1\n7_1|OUT_OF_MEMORY|0:125|n2\n7_2|CANCELLED by 0|0:0|n1\n"
                                   "7_3|COMPLETED|0:0|n2\n")
    shown = __main__.table(grid)
    assert [row[4] for row in rows(shown)] == ["1 failed, 1 out_of_memory", "1 cancelled, 1 completed"]
    assert shown.splitlines()[0].endswith(f"; logs: {grid.folder / 'logs'}")
    first, second, missing = lines(shown)
    assert first == f"job 7_0 (seed=0, shard 1 of 2): failed 2:0 on n1: failed: dataset.path: given nothing; log: {log}"
    assert second == (f"job 7_1 (seed=0, shard 2 of 2): out_of_memory 0:125 on n2: it has noted no event; check that its "
                      f"node can read {grid.folder}")
    assert missing.startswith("1 samples have no job: python -m dflash_mcmc.grid resume")


def test_without_accounting_jobs_speak_for_themselves(grid, slurm_commands):
    slurm_commands.refuse("sacct", "Slurm accounting storage is disabled\n")
    grid.note(grid.jobs[1], "started")
    grid.note(grid.jobs[1], "failed", "the worker died 4 times")
    grid.note(grid.jobs[2], "complete")
    assert [row[4] for row in rows(__main__.table(grid))] == ["1 unknown, 1 failed", "1 completed, 1 unknown"]


def test_without_slurm_the_run_folders_are_shown(grid, no_slurm):
    shown = __main__.table(grid)
    assert [row[1:4] for row in rows(shown)] == [["3", "1", "1"], ["4", "0", "1"]]
    assert "SLURM is not on this machine" in shown


def test_a_job_that_slurm_has_forgotten_is_not_live(grid, slurm_commands):
    slurm_commands.refuse("squeue", "slurm_load_jobs error: Invalid job id specified\n")
    assert not any(state.live for state in __main__.states(grid).values())


def test_folders_of_grids_are_no_runs(grid):
    from dflash_mcmc.report.reading import run_folders

    found = run_folders([grid.folder.parents[1]])
    assert sorted(run.folder.name for run in found) == ["seed=0", "seed=1"]


def test_a_complete_grid_names_the_report(grid, no_slurm):
    assert "now run" not in __main__.table(grid)
    grid.points = grid.points[1:]
    grid.jobs = []
    grid.point_file(1).rename(grid.point_file(0))
    experiment = Path(grid.points[0].folder).parent
    assert lines(__main__.table(grid))[-1] == f"all samples are drawn; now run: python -m dflash_mcmc.report {experiment}"


def test_a_point_whose_model_is_gone_is_counted_by_its_records(grid, no_slurm, tmp_path):
    path = grid.point_file(0)
    for old in [line for line in path.read_text().splitlines() if "assets/tiny" in line and "path:" in line]:
        path.write_text(path.read_text().replace(old, f"{old.partition(':')[0]}: {tmp_path}/gone"))
    assert __main__.progress(grid, 0)[:3] == (3, 1, 1)
    assert any("gone" in line and "all recorded samples are counted" in line for line in lines(__main__.table(grid)))


def test_folders_that_name_a_grid(grid):
    outputs = grid.folder.parents[2]
    for folder in (grid.folder, grid.folder.parent, grid.folder.parents[1], outputs):
        assert [found.folder for found in find([str(folder)], outputs)] == [grid.folder.resolve()]
