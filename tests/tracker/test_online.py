"""`tracker=wandb` with a server on this machine: a resumed run is complete."""

import json

import pytest

from dflash_mcmc.store.records import read_records
from dflash_mcmc.tracker import SAMPLE_COLUMNS
from tests import processes
from tests.tracker.loopback import Loopback

SWEEP = ("-m", "dflash_mcmc", "-m", "experiment=demo", "tracker=wandb", "condition=ps", "sampler.alpha=2",
         "sampler.num_blocks=2", "sampler.num_steps=1", "dataset.limit=2,5", "seed=1")


@pytest.mark.slow
def test_a_resumed_run_is_one_run_with_a_readable_name(tmp_path):
    """A sweep over dataset.limit starts and then resumes the same run, which has each record once and two artifacts."""
    with Loopback() as server:
        done = processes.run(SWEEP, tmp_path, 120, WANDB_DATA_DIR=None, **server.environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "W&B is offline" not in done.stderr
    assert server.unknown == []
    (folder,) = (tmp_path / "outputs/demo").glob("power_mh-*")
    identity = folder.name.rpartition("-")[2]
    run, records = server.run(f"demo-{identity}"), read_records(folder)
    assert run.labels == {"displayName": "ps alpha=2 num_blocks=2 num_steps=1 seed=1", "groupName": "demo", "jobType": "ps",
                          "tags": ["model=tiny", "sampler=power_mh", "dataset=arith"]}
    assert (run.exit_code, run.config["identity"]["value"], run.config["sampler"]["value"]["alpha"]) == (0, identity, 2.0)
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
    found = [artifact for artifact in server.artifacts.values() if artifact.collection == f"records-demo-{identity}"]
    assert [(artifact.version, artifact.committed, artifact.run) for artifact in found] == [
        (version, True, f"demo-{identity}") for version in range(2)]
    files = server.files(found[-1])
    for name in ("records.jsonl", "config.yaml"):
        assert files[name] == (folder / name).read_bytes()
    assert found[-1].metadata["identity"]["sampler.alpha"] == 2.0
