"""`tracker=wandb`, offline: the file that W&B writes is read back, and holds what the run says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mcmc.run import execute
from dflash_mcmc.tracker.wandb import TABLE_COLUMNS


def inspect(folder: Path, *flags: str) -> str:
    """What W&B's own reader says of an offline run."""
    wandb = Path(sys.executable).parent / "wandb"
    # It exits with 1 for a run that did, though it reads it.
    done = subprocess.run([wandb, "leet", "inspect", *flags, "--json", folder], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.stdout


def entries(folder: Path, kind: str) -> list[dict]:
    """The entries of one kind in the file, in order."""
    parsed = [json.loads(line) for line in inspect(folder).splitlines()]
    return [entry[kind] for entry in parsed if entry["type"] == kind]


def runs(outputs: Path) -> list[Path]:
    return sorted(path for path in (outputs / "wandb").glob("offline-run-*"))


@pytest.fixture
def tracked(make_config, tmp_path, monkeypatch):
    """A function that runs and returns the result with the folder that W&B made."""
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))

    def run(*overrides):
        before = set(runs(tmp_path))
        result = execute(make_config("tracker=wandb", "experiment=demo", "tracker=wandb", *overrides))
        (made,) = set(runs(tmp_path)) - before
        return result, made

    return run


def test_offline_file_holds_config_metrics_summary_and_samples(tracked, capsys):
    result, folder = tracked("condition=ps", "sampler.num_steps=1", "sampler.num_blocks=4", "dataset.limit=4")
    assert f"wandb sync {folder}" in capsys.readouterr().err
    identity = result.folder.name.rpartition("-")[2]
    (run,) = entries(folder, "run")
    assert (run["run_id"], run["run_group"], run["job_type"]) == (f"demo-{identity}", "demo", "ps")
    assert run["display_name"] == f"ps-{identity}"
    config = run["config"]["update"]
    assert config["sampler"] == {**config["sampler"], "name": "power_mh", "alpha": 4.0, "num_blocks": 4}

    records = [json.loads(line) for line in (result.folder / "records.jsonl").read_text().splitlines()]
    items = [entry["item"] for entry in entries(folder, "history")]
    samples = [item for item in items if "sample/log_p" in item]
    assert [item["finished"] for item in samples] == [1, 2, 3, 4]
    assert [item["sample/log_p"] for item in samples] == pytest.approx([record["log_p"] for record in records])
    assert [item["sample/moved_rate"] for item in samples] == pytest.approx([r["moved"] / r["proposals"] for r in records])
    assert any(metric.get("step_metric") == "finished" for metric in entries(folder, "metric"))

    kept = json.loads(inspect(folder, "--summary"))
    assert kept["exit_code"] == 0
    for name, value in result.summary.items():
        told = kept["summary"].get(name)  # what is null is left out
        assert told == pytest.approx(value) if isinstance(value, float) else told == value
    (file,) = folder.glob("files/media/table/*.json")
    table = json.loads(file.read_text())
    assert table["columns"] == list(TABLE_COLUMNS)
    assert [row[0] for row in table["data"]] == [record["problem"] for record in records]


def test_continued_run_has_the_same_id_and_goes_on_counting(tracked):
    _, first = tracked("condition=greedy", "dataset.limit=2")
    _, second = tracked("condition=greedy", "dataset.limit=5")
    assert entries(first, "run")[0]["run_id"] == entries(second, "run")[0]["run_id"]
    counted = [[item["item"]["finished"] for item in entries(folder, "history") if "sample/log_p" in item["item"]]
               for folder in (first, second)]
    assert counted == [[1, 2], [3, 4, 5]]


def test_a_killed_run_keeps_what_was_logged_a_moment_before(tmp_path):
    """W&B's default is to keep 15 s in memory, which a kill would lose."""
    script = tmp_path / "killed.py"
    script.write_text("""
import os, signal, time
from pathlib import Path
from dflash_mcmc.tracker import RunInfo
from dflash_mcmc.tracker.wandb import WandbTracker
run = WandbTracker(project="p", entity=None, mode="offline", folder=".", connect_seconds=9).start(
    RunInfo("abc", "e", "c", {}, Path(".")))
for step in range(1, 6):
    run.log({"sample/log_p": -1.0}, step)
time.sleep(4)
os.kill(os.getpid(), signal.SIGKILL)
""")
    # Without the service of the test process, which W&B hands on to children and which would outlive the kill.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    subprocess.run([sys.executable, script], cwd=tmp_path, check=False, env=environment)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert [entry["item"]["finished"] for entry in entries(folder, "history")] == [1, 2, 3, 4, 5]


def test_without_login_it_is_offline_and_asks_nobody(tracked, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    result, folder = tracked("condition=greedy", "dataset.limit=2")
    assert result.summary["num_samples"] == 2
    assert "W&B is offline (not logged in)" in capsys.readouterr().err
    assert folder.is_dir()


def test_an_unreachable_server_is_waited_for_briefly_and_then_done_without(command, tmp_path):
    done = command("dflash_mcmc", "condition=greedy", "dataset.limit=2", "tracker.connect_seconds=3", WANDB_MODE="online",
                   WANDB_API_KEY="f" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert "W&B is offline (no connection" in done.stderr
    (folder,) = [path for path in runs(tmp_path / "outputs") if list(path.glob("*.wandb"))]
    assert json.loads(inspect(folder, "--summary"))["exit_code"] == 0
