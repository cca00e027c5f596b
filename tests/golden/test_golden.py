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


def draw(folder: Path, name: str) -> dict:
    """Runs a stored run's command in a folder; its records and the name of its folder."""
    done = processes.run(["-m", "dflash_mcmc", *runs.overrides(name), f"paths.outputs={folder}"], folder)
    assert done.returncode == 0, done.stderr
    return runs.read(folder)


@pytest.mark.parametrize("name", runs.RUNS)
def test_a_run_draws_the_stored_records(name, tmp_path):
    found, stored = draw(tmp_path, name), runs.stored(name)
    assert found["folder"] == stored["folder"], "the identity hash of the run has changed"
    assert runs.differences(found, stored, TOLERANCE) == []


@pytest.mark.parametrize("name", ["power_mh", "probe_layer_rank"])
def test_a_run_of_an_older_version_is_continued(name, tmp_path):
    """Each folder was written with one of the two problems. Its records stay byte for byte, and the missing ones are drawn."""
    stored = runs.stored(name)
    folder = shutil.copytree(OLD_RUNS / stored["folder"], tmp_path / stored["folder"])
    old = (folder / "records.jsonl").read_bytes()
    sessions = len(json.loads((folder / "run.json").read_text())["sessions"])
    found = draw(tmp_path, name)
    assert runs.differences(found, stored, TOLERANCE) == []
    new = (folder / "records.jsonl").read_bytes()
    assert new.startswith(old)
    assert new.count(b"\n") - old.count(b"\n") == len(stored["records"]) // 2
    assert len(json.loads((folder / "run.json").read_text())["sessions"]) == sessions + 1
