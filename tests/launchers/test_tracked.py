"""Grids with W&B: each point is one W&B run, even with several jobs and after faults."""

from pathlib import Path

from tests.launchers.test_grid import LONG, Submitter, keys
from tests.tracker.test_wandb import entries

TRACKED = tuple(text for text in LONG if not text.startswith("tracker"))


def test_every_point_is_one_run(slurm, tmp_path):
    submitter = Submitter(slurm, tmp_path)
    grid = submitter.submit(*TRACKED, "seed=0,1", "tracker=wandb", "tracker.mode=offline", "dataset.limit=12", "shards=2",
                            "array_parallelism=4")
    submitter.wait_for_records(2)
    for job in grid.jobs[:2]:  # the jobs of the first point
        slurm.run("scancel", "--signal=USR1", job.id)
    submitter.wait()
    segments: dict[str, list[Path]] = {}
    for folder in sorted((tmp_path / "outputs/wandb").glob("offline-run-*")):
        (run,) = entries(folder, "run")
        segments.setdefault(run["run_id"], []).append(folder)
    assert sorted(segments) == sorted(f"default-{point.digest}" for point in grid.points)
    for point, records in zip(grid.points, submitter.records(), strict=True):
        assert len(set(keys(records))) == len(records) == 12
        folders = segments[f"default-{point.digest}"]
        counted = [row["item"]["finished"] for folder in folders for row in entries(folder, "history")
                   if "sample/log_p" in row["item"]]
        assert sorted(counted) == list(range(1, 13))
    first = segments[f"default-{grid.points[0].digest}"]
    assert len(first) > 1
    assert any(entries(folder, "preempting") for folder in first)
