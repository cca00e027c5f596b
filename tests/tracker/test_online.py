"""`tracker=wandb` with a server on this machine. Resumed runs and runs that are uploaded later are complete."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mcmc.store.reading import read_records
from dflash_mcmc.tracker import SAMPLE_COLUMNS
from tests import processes
from tests.runner.test_tracking import KILLED
from tests.tracker.loopback import Loopback, Run

SETTING = ("experiment=demo", "tracker=wandb", "condition=ps", "sampler.alpha=2", "sampler.num_blocks=2",
           "sampler.num_steps=1")


@pytest.fixture(scope="module")
def server():
    with Loopback() as server:
        yield server


def python(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    return processes.run(arguments, folder, 120, **{"WANDB_DATA_DIR": None, **environment})


def whole(server: Loopback, name: str, folder: Path, versions: int) -> Run:
    """Checks that the run has each record of the folder once, the summary, the table and the artifact. Returns the run."""
    run = server.run(name)
    records = read_records(folder)
    samples = [row for row in run.history if "sample/log_p" in row]
    assert [row["finished"] for row in samples] == list(range(1, len(records) + 1))
    assert [row["sample/log_p"] for row in samples] == pytest.approx([record["log_p"] for record in records])
    steps = [row["_step"] for row in run.history]
    assert steps == sorted(set(steps))
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("accuracy", "accuracy_low", "accuracy_high"):
        assert run.summary[key] == pytest.approx(summary[key])
        assert samples[-1][f"running/{key}"] == pytest.approx(summary[key])
    table = json.loads(run.files[run.summary["samples"]["path"]])
    assert table["columns"] == list(SAMPLE_COLUMNS)
    assert [row[0] for row in table["data"]] == [record["problem"] for record in records]
    found = [artifact for artifact in server.artifacts.values() if artifact.collection == f"records-{name}"]
    assert [(artifact.version, artifact.committed, artifact.run) for artifact in found] == [
        (version, True, name) for version in range(versions)]
    files = server.files(found[-1])
    assert files["records.jsonl"] == (folder / "records.jsonl").read_bytes()
    assert files["config.yaml"] == (folder / "config.yaml").read_bytes()
    assert found[-1].metadata["identity"]["sampler.alpha"] == 2.0
    assert run.exit_code == 0
    assert server.unknown == []
    return run


@pytest.mark.slow
def test_a_resumed_run_is_one_run_with_a_readable_name(server, tmp_path):
    """A sweep over dataset.limit starts and then resumes the same run."""
    done = python(tmp_path, server.environment(tmp_path), "-m", "dflash_mcmc", "-m", *SETTING, "dataset.limit=2,5", "seed=1")
    assert done.returncode == 0, done.stderr
    assert "W&B is offline" not in done.stderr
    (folder,) = (tmp_path / "outputs/demo").glob("power_mh-*")
    run = whole(server, f"demo-{folder.name.rpartition('-')[2]}", folder, versions=2)
    assert run.labels == {"displayName": "ps alpha=2 num_blocks=2 num_steps=1 seed=1", "groupName": "demo", "jobType": "ps",
                        "tags": ["model=tiny", "sampler=power_mh", "dataset=arith"]}
    assert run.config["identity"]["value"] == folder.name.rpartition("-")[2]
    assert run.config["sampler"]["value"]["alpha"] == 2.0


@pytest.mark.slow
def test_offline_parts_of_a_run_are_uploaded_as_one_run(server, tmp_path):
    """The first start is killed before its summary, and the second one resumes the run. Both are uploaded together."""
    environment = server.environment(tmp_path)
    offline = {**environment, "WANDB_MODE": "offline"}
    setting = [*SETTING, "seed=2"]
    # The tracker asks W&B to write what is logged every second. By default it holds 15 s, which a kill would lose.
    killed = python(tmp_path, {**offline, "PAUSE": "2"}, "-c", KILLED, *setting, "dataset.limit=2")
    assert killed.returncode == -9
    done = python(tmp_path, offline, "-m", "dflash_mcmc", *setting, "dataset.limit=4")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs/demo").glob("power_mh-*")
    parts = sorted((tmp_path / "outputs/wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert f"wandb sync {parts[1].relative_to(tmp_path)}" in done.stderr
    synced = subprocess.run([Path(sys.executable).parent / "wandb", "sync", *parts], cwd=tmp_path, capture_output=True,
                            text=True, env={**os.environ, **environment}, timeout=processes.HANG)
    assert synced.returncode == 0, synced.stderr
    whole(server, f"demo-{folder.name.rpartition('-')[2]}", folder, versions=1)
