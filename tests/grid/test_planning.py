"""What a grid's points lack, and how many jobs that takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dflash_mcmc.config import command as cli
from dflash_mcmc.errors import UserError
from dflash_mcmc.grid import submission

BASE = ("-m", "tracker=none", "dataset.limit=4")


def planned(*arguments: str, outputs) -> list[submission.Planned]:
    cli.prepare()
    command = cli.check_command([*BASE, f"paths.outputs={outputs}", *arguments])
    return submission.plan(command.jobs)


def lay(folder, *keys, torn: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"problem": problem, "chain": chain, "verdict": verdict, "share_seconds": 2.0})
             for problem, chain, verdict in keys]
    (folder / "records.1.jsonl").write_text("\n".join([*lines, torn]))


def test_points_are_those_of_the_sweep_with_what_differs_as_label(tmp_path):
    points = planned("condition=greedy,ps", "seed=1,2", outputs=tmp_path)
    assert [point.label for point in points] == ["greedy seed=1", "greedy seed=2", "ps seed=1", "ps seed=2"]
    assert len({point.folder for point in points}) == 4
    assert [point.num_pending for point in points] == [4, 4, 4, 4]
    assert {point.job.choices["condition"] for point in points} == {"greedy", "ps"}


def test_points_that_come_to_one_run_are_one_and_the_larger_counts(tmp_path):
    points = planned("condition=greedy", "sampler.alpha=1,2,3", outputs=tmp_path)
    assert [point.num_asked for point in points] == [4]
    points = planned("condition=ps", "num_chains=1,3,2", outputs=tmp_path)
    assert [(point.label, point.num_asked) for point in points] == [("ps num_chains=3", 12)]


def test_what_is_recorded_is_not_pending(tmp_path):
    (point,) = planned("condition=ps", "num_chains=2", outputs=tmp_path)
    first, second, *_ = sorted(point.asked)
    lay(point.folder, (*first, "correct"), (*second, "not_drawn"), ("of another", 0, "wrong"),
        torn=json.dumps({"problem": "torn", "chain": 0})[:-1])
    (again,) = planned("condition=ps", "num_chains=2", outputs=tmp_path)
    assert (again.num_asked, again.num_pending) == (8, 6)
    recorded = submission.recorded(point.folder)
    assert recorded.share_seconds == 2.0
    assert submission.failed(recorded.verdicts) == 1


def test_the_rate_follows_what_was_drawn_lately(tmp_path):
    """Fifty samples of each process that still records; a file that stopped growing hours ago tells of another job."""
    def write(name: str, shares: list[float], hours_ago: float) -> None:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"problem": f"{name} {number}", "chain": 0, "share_seconds": share}) + "\n"
                                for number, share in enumerate(shares)))
        os.utime(path, (at := path.stat().st_mtime - 3600 * hours_ago, at))

    write("records.jsonl", [100.0] * 20 + [3.0] * 50, hours_ago=0)
    write("records.1.jsonl", [1.0] * 50, hours_ago=0.9)
    write("records.2.jsonl", [500.0] * 50, hours_ago=1.1)
    assert submission.recorded(tmp_path).share_seconds == 2.0


def test_files_that_are_no_records_are_none(tmp_path):
    """As one that was moved away to begin anew."""
    lay(tmp_path, ("a", 0, "correct"))
    (tmp_path / "records.1.jsonl").rename(tmp_path / "records.old.jsonl")
    assert submission.num_pending(tmp_path, {("a", 0)}) == 1
    lay(tmp_path, ("a", 0, "correct"))
    (tmp_path / "summary.json").write_text("")
    assert submission.num_pending(tmp_path, {("a", 0)}) == 1
    (tmp_path / "summary.json").write_text('{"num_samples": 1}')
    assert submission.num_pending(tmp_path, {("a", 0)}) == 0


def test_a_corrupt_record_is_told(tmp_path):
    (tmp_path / "records.jsonl").write_text('{"chain": 0}\n')
    with pytest.raises(UserError, match=r"records\.jsonl: line 1: problem: given nothing; allowed: a value"):
        submission.recorded(tmp_path)


def test_units_of_a_probe_are_planned(tmp_path):
    (point,) = planned("probe=mixing", "num_chains=2", outputs=tmp_path)
    assert point.num_pending == point.num_asked == len(point.job.config.probe.units(point.job.config))


def test_no_job_has_nothing_to_draw():
    assert [submission.num_shards(pending, 8) for pending in (0, 3, 8, 100)] == [0, 3, 8, 8]


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


def test_a_large_grid_is_planned_in_little_memory_without_the_models_libraries(tmp_path):
    """10,000 problems x 8 chains below 200 MB."""
    with (tmp_path / "tasks.jsonl").open("w") as file:
        for number in range(10_000):
            task = {"id": str(number), "question": f"How much is {number} + 1?", "answer": str(number + 1)}
            file.write(json.dumps(task) + "\n")
    done = subprocess.run([sys.executable, "-c", LARGE], cwd=tmp_path, capture_output=True, text=True, check=True)
    print(done.stdout, done.stderr)
    pending, megabytes, torch, transformers = done.stdout.split()
    assert pending == "80000"
    assert int(megabytes) < 200
    assert (torch, transformers) == ("False", "False")


def test_a_run_that_lacks_nothing_but_its_summary_takes_one_job(tmp_path):
    """Its last process was killed behind the last record."""
    (point,) = planned("condition=ps", outputs=tmp_path)
    lay(point.folder, *((*key, "correct") for key in sorted(point.asked)))
    assert planned("condition=ps", outputs=tmp_path)[0].num_pending == 1
    (point.folder / "summary.json").write_text(json.dumps({"num_samples": 3}))
    assert planned("condition=ps", outputs=tmp_path)[0].num_pending == 1
    (point.folder / "summary.json").write_text(json.dumps({"num_samples": 4}))
    assert planned("condition=ps", outputs=tmp_path)[0].num_pending == 0
