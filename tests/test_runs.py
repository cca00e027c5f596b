"""The list of runs: the state of each from its folder alone, and nothing is written."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys

import pytest

from dflash_mcmc import runs
from dflash_mcmc.errors import UserError
from dflash_mcmc.store.folder import RunStore
from tests.conftest import ROOT
from tests.runs import execute

HOLD = """
import pathlib, sys
from dflash_mcmc.store.folder import RunStore
with RunStore.open(pathlib.Path(sys.argv[1])):
    print("open", flush=True)
    sys.stdin.read()
"""
"""Holds a run open as a process that draws it does, and ends with its input."""


@pytest.fixture
def folders(make_config):
    """Three complete runs of two samples, of the conditions greedy, temp and blend_greedy."""
    return [execute(make_config("experiment=demo", f"condition={name}", "dataset.limit=2")).folder
            for name in ("greedy", "temp", "blend_greedy")]


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_states_accuracy_and_cost(folders, tmp_path):
    done, partial, damaged = folders
    lines = (partial / "records.jsonl").read_text().splitlines(keepends=True)
    (partial / "records.jsonl").write_text(lines[0])
    (damaged / "records.jsonl").write_text("nothing\n")
    before = files(tmp_path)
    found = {run.run: run for run in runs.listed([tmp_path])}
    assert files(tmp_path) == before
    assert [found[str(folder)].state for folder in folders] == [runs.DONE, runs.PARTIAL, runs.DAMAGED]
    summary = json.loads((done / "summary.json").read_text())
    complete = found[str(done)]
    assert (complete.label, complete.records) == ("greedy", 2)
    assert (complete.accuracy, complete.token_forwards) == (summary["accuracy"], summary["token_forwards"])
    assert found[str(partial)].records == 1
    assert "records.jsonl: line 1" in found[str(damaged)].reason


def test_a_run_that_a_process_has_open_is_running(folders):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, folders[0]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              cwd=ROOT)
    with holder:
        assert holder.stdout.readline() == b"open\n"
        assert runs.listed([folders[0]])[0].state == runs.RUNNING
        assert runs.listed([folders[1]])[0].state == runs.DONE
        holder.stdin.close()
    assert holder.returncode == 0
    assert runs.listed([folders[0]])[0].state == runs.DONE


def test_a_run_that_this_process_has_open_is_running_and_keeps_its_locks(folders):
    with RunStore.open(folders[0]):
        assert runs.listed([folders[0]])[0].state == runs.RUNNING
        seen = subprocess.run([sys.executable, "-m", "dflash_mcmc.runs", folders[0]], capture_output=True, cwd=ROOT, text=True)
        assert f"| {runs.RUNNING} " in seen.stdout


@pytest.mark.parametrize(("seconds", "shown"), [(5, "5 s"), (60, "1 min"), (7199, "1 h"), (3 * 86400, "3 d"), (-4, "0 s")])
def test_age(seconds, shown):
    now = datetime.datetime.now().astimezone()
    assert runs.age((now - datetime.timedelta(seconds=seconds)).isoformat(), now) == shown


def test_age_that_is_unknown():
    assert runs.age(None, datetime.datetime.now().astimezone()) == "-"


def test_the_command_prints_a_table_with_the_newest_start_first(folders, capsys, tmp_path):
    for number, folder in enumerate(folders):
        described = json.loads((folder / "run.json").read_text())
        described["sessions"][-1]["started"] = f"2026-01-0{(2, 3, 1)[number]}T00:00:00+00:00"
        (folder / "run.json").write_text(json.dumps(described))
    runs.main.__wrapped__([str(tmp_path)])
    shown = capsys.readouterr().out
    places = [shown.index(f"| {folder} ") for folder in folders]
    assert places[1] < places[0] < places[2]


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(UserError, match="no run folder below"):
        runs.main.__wrapped__([str(tmp_path)])
    with pytest.raises(UserError, match="--outputs: given"):
        runs.main.__wrapped__(["--outputs", str(tmp_path / "nowhere")])
