"""The stored runs, drawn again on any machine: floats are compared to a tolerance, everything else exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import processes
from tests.golden import runs

TOLERANCE = 1e-4
"""Of a float, relative to the larger of 1 and its size: other processors sum in another order."""
OLD_RUNS = Path(__file__).with_name("old_runs")


SEVERAL = """
import json, sys
from dflash_mcmc.__main__ import main
for arguments in json.loads(sys.argv[1]):
    print(arguments[-1], file=sys.stderr, flush=True)
    try:
        main(arguments)
    except SystemExit as ended:
        assert not ended.code, ended.code
"""
"""A program that runs several commands: its imports and the first composition cost as much as a stored run."""
NAMES = list(runs.RUNS)
GROUPS = [NAMES[start:start + 6] for start in range(0, len(NAMES), 6)]


def draw(outputs: dict[str, Path], folder: Path) -> dict[str, dict]:
    """Runs the commands of stored runs with their folders of outputs; what `runs.read` reads there."""
    commands = [[*runs.overrides(name), f"paths.outputs={path}"] for name, path in outputs.items()]
    done = processes.run(["-c", SEVERAL, json.dumps(commands)], folder, timeout=600)
    assert done.returncode == 0, done.stderr
    return {name: runs.read(path) for name, path in outputs.items()}


def differences(found: dict, name: str) -> list[str]:
    """Where a run differs from the stored one; another folder name is another identity hash."""
    return runs.differences(found, runs.stored(name), TOLERANCE, name)


@pytest.mark.parametrize("names", GROUPS, ids=["-".join((names[0], "to", names[-1])) for names in GROUPS])
def test_the_stored_records_are_drawn_again(names, tmp_path):
    drawn = draw({name: tmp_path / name for name in names}, tmp_path)
    assert [line for name in names for line in differences(drawn[name], name)] == []


def test_runs_of_an_older_version_are_continued(tmp_path):
    """Each folder was written with one of two problems. Its records stay byte for byte, and the missing ones are drawn."""
    old = {name: OLD_RUNS / runs.stored(name)["folder"] for name in ("power_mh", "probe_layer_rank")}
    new = {name: shutil.copytree(folder, tmp_path / name / runs.stored(name)["folder"]) for name, folder in old.items()}
    drawn = draw({name: tmp_path / name for name in old}, tmp_path)
    for name in old:
        assert differences(drawn[name], name) == []
        before, after = ((folder[name] / "records.jsonl").read_bytes() for folder in (old, new))
        assert after.startswith(before)
        assert before.count(b"\n") == after.count(b"\n") / 2 == len(drawn[name]["records"]) / 2
        sessions = [json.loads((folder[name] / "run.json").read_text())["sessions"] for folder in (old, new)]
        assert sessions[1][:1] == sessions[0]
        assert len(sessions[1]) == 2


def test_a_difference_is_seen():
    """The comparison itself: floats have a tolerance and everything else has none."""
    stored = {"tokens": [1, 2], "log_p": -1.5, "moved": None}
    assert runs.differences({**stored, "log_p": -1.50001}, stored, TOLERANCE) == []
    for changed in ({"tokens": [1, 3]}, {"tokens": [1]}, {"log_p": -1.51}, {"log_p": -1}, {"moved": 0}, {"more": 1}):
        assert len(runs.differences({**stored, **changed}, stored, TOLERANCE)) == 1
    assert len(runs.differences({**stored, "log_p": -1.50001}, stored, 0.0)) == 1
