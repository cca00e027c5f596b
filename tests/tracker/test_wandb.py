"""`tracker=wandb` offline: the file that W&B writes contains the data of the run."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from statsmodels.stats.proportion import proportion_confint
from tqdm import tqdm

from dflash_mcmc.store.records import PROBLEMS, as_lines, read_records
from dflash_mcmc.tracker import SAMPLE_COLUMNS, RunInfo, sample_rows
from dflash_mcmc.tracker.wandb import WandbTracker, artifact_name
from tests.runs import execute
from tests.statistics.test_summaries import record as sample


def inspect(folder: Path, *flags: str) -> str:
    """Output of W&B's own reader for an offline run. It is empty if W&B was killed before it wrote anything."""
    wandb = Path(sys.executable).parent / "wandb"
    # For a killed run it prints the data, but exits with 1.
    done = subprocess.run([wandb, "leet", "inspect", *flags, "--json", folder], capture_output=True, text=True, check=False)
    assert done.stdout or done.returncode == 0, done.stderr
    return done.stdout


def entries(folder: Path, kind: str) -> list[dict]:
    """The entries of one kind in the file, in order."""
    parsed = [json.loads(line) for line in inspect(folder).splitlines()]
    return [entry[kind] for entry in parsed if entry["type"] == kind]


def runs(outputs: Path) -> list[Path]:
    return sorted(path for path in (outputs / "wandb").glob("offline-run-*"))


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """W&B writes only below the test's folder."""
    for name in ("data", "cache", "config"):
        monkeypatch.setenv(f"WANDB_{name.upper()}_DIR", str(tmp_path / name))


@pytest.fixture
def tracked(make_config, tmp_path, folders):
    """A function that executes a run, and returns its result and the folder of W&B."""
    def run(*overrides):
        before = set(runs(tmp_path))
        result = execute(make_config("tracker=wandb", "experiment=demo", "tracker=wandb", *overrides))
        (made,) = set(runs(tmp_path)) - before
        return result, made

    return run


def test_the_offline_file_has_config_metrics_summary_and_samples(tracked, capsys):
    result, folder = tracked("condition=ps", "sampler.num_steps=1", "sampler.num_blocks=4", "dataset.limit=4")
    assert f"wandb sync {folder}" in capsys.readouterr().err
    identity = result.folder.name.rpartition("-")[2]
    (run,) = entries(folder, "run")
    assert (run["run_id"], run["run_group"], run["job_type"]) == (f"demo-{identity}", "demo", "ps")
    assert run["display_name"] == "ps"  # without a command line the name is only the condition
    assert run["tags"] == ["model=hf", "sampler=power_mh", "dataset=arith"]
    config = run["config"]["update"]
    assert config["identity"] == identity
    assert config["sampler"] == {**config["sampler"], "name": "power_mh", "alpha": 4.0, "num_blocks": 4}

    records = read_records(result.folder)
    items = [entry["item"] for entry in entries(folder, "history")]
    samples = [item for item in items if "sample/log_p" in item]
    assert [item["finished"] for item in samples] == [1, 2, 3, 4]
    assert [item["sample/log_p"] for item in samples] == pytest.approx([record["log_p"] for record in records])
    assert [item["sample/moved_rate"] for item in samples] == pytest.approx([r["moved"] / r["proposals"] for r in records])
    axes = {metric["name"]: metric.get("step_metric") for metric in entries(folder, "metric")}
    assert {axes[name] for name in ("sample/log_p", "running/accuracy", "samples")} == {"finished"}
    correct = list(itertools.accumulate(record["verdict"] == "correct" for record in records))
    for count, (item, hits) in enumerate(zip(samples, correct, strict=True), start=1):
        low, high = proportion_confint(hits, count, method="wilson")
        assert [item[f"running/accuracy{end}"] for end in ("", "_low", "_high")] == pytest.approx([hits / count, low, high])

    kept = json.loads(inspect(folder, "--summary"))
    assert kept["exit_code"] == 0
    for name, value in result.summary.items():
        logged = kept["summary"].get(name)  # null values are left out
        assert logged == pytest.approx(value) if isinstance(value, float) else logged == value
    for end in ("", "_low", "_high"):
        assert kept["summary"][f"running/accuracy{end}"] == pytest.approx(result.summary[f"accuracy{end}"])
    assert kept["summary"]["label"] == "ps"
    # Values of a single sample do not belong in the summary.
    assert not [name for name in kept["summary"] if name.startswith("sample/")]
    (file,) = folder.glob("files/media/table/*.json")
    table = json.loads(file.read_text())
    assert table["columns"] == list(SAMPLE_COLUMNS)
    rows = [dict(zip(SAMPLE_COLUMNS, row, strict=True)) for row in table["data"]]
    for row, record in zip(rows, records, strict=True):
        assert row["correct"] == (record["verdict"] == "correct")
        assert row["acceptance"] == pytest.approx(record["accepted"] / record["proposals"])
        assert all(row[name] == record[name] for name in ("problem", "answer", "log_p", "finish_reason", "text"))
        assert row["question"] in row["prompt"]
    check_artifact(folder, result.folder, f"records-demo-{identity}")


def test_the_question_is_in_the_first_row_of_a_problem(tmp_path):
    (tmp_path / PROBLEMS).write_bytes(as_lines([{"id": "a", "question": "How many?", "gold": "1", "prompt": "P"}]))
    rows = sample_rows([sample("a", "correct", chain) for chain in range(2)], tmp_path)
    assert [(row["question"], row["prompt"]) for row in rows] == [("How many?", "P"), (None, None)]


def check_artifact(folder: Path, run: Path, name: str) -> None:
    """Checks that the last artifact of an offline run is that of the records, and that its files are kept for a sync."""
    artifact = entries(folder, "artifact")[-1]
    assert (artifact["name"], artifact["type"], artifact["aliases"]) == (name, "records", ["latest"])
    assert json.loads(artifact["metadata"])["identity"] == json.loads((run / "run.json").read_text())["identity"]
    staged = {entry["path"]: Path(entry["local_path"]).read_bytes() for entry in artifact["manifest"]["contents"]}
    assert staged.keys() == {"records.jsonl", "problems.jsonl", "config.yaml", "run.json", "summary.json"}
    for path in ("records.jsonl", "problems.jsonl", "config.yaml", "summary.json"):
        assert staged[path] == (run / path).read_bytes()


@pytest.mark.slow
def test_tables_and_figures_of_a_probe(tmp_path, folders):
    from matplotlib.figure import Figure

    figure = tmp_path / "ranks.png"
    Figure().savefig(figure)
    (tmp_path / "run.json").write_text('{"identity": {"seed": 0}}')
    (tmp_path / "means.csv").write_text("a\n1\n")
    run = offline(tmp_path).start(RunInfo("0a1b", "über", "probe", {}, tmp_path, "probe seed=1", ("model=tiny",)))
    run.log({"unit/rank": 3.0}, 1)
    run.summary({"mean_rank": 3.0}, [{"problem": "p", "chain": 0, "rank": 3}])
    run.publish(tmp_path, {"means": [{"layer": 1, "mean": None}, {"layer": "last", "mean": 0.5}]}, [figure])
    run.finish(0)
    (folder,) = runs(tmp_path)
    kept = json.loads(inspect(folder, "--summary"))
    assert (kept["name"], kept["tags"]) == ("probe seed=1", ["model=tiny"])
    assert kept["summary"]["mean_rank"] == 3.0
    assert "samples" not in kept["summary"]  # records of a probe are not samples
    table = json.loads((folder / "files" / kept["summary"]["tables/means"]["path"]).read_text())
    assert table == {"columns": ["layer", "mean"], "data": [[1, None], ["last", 0.5]]}
    assert (folder / "files" / kept["summary"]["figures/ranks"]["path"]).read_bytes() == figure.read_bytes()
    assert {item["item"]["finished"] for item in entries(folder, "history")} == {1}
    artifact = entries(folder, "artifact")[-1]
    assert artifact["name"] == artifact_name("records", "über", "0a1b") == "records-_ber-0a1b"
    assert {entry["path"] for entry in artifact["manifest"]["contents"]} == {"run.json", "means.csv"}


def test_the_line_about_an_offline_run_is_not_in_the_bar(tmp_path, folders, capsys):
    with tqdm(total=3, desc="bar", ncols=40) as bar:
        offline(tmp_path).start(RunInfo("0a1c", "e", "c", {}, tmp_path, "probe", ())).finish(0)
        bar.refresh()
    lines = capsys.readouterr().err.split("\n")
    assert lines[0].startswith("\rbar:   0%")
    shown = [line.rpartition("\r")[2] for line in lines]
    assert shown[0].startswith("W&B is offline (")
    assert shown[1].startswith("bar:   0%")


def offline(folder: Path) -> WandbTracker:
    return WandbTracker(project="p", entity=None, mode="offline", folder=str(folder))


def test_another_project_and_a_disabled_run_are_noted_apart(monkeypatch):
    """What W&B did not get, or got elsewhere, is logged by the next start."""
    keys = [WandbTracker().key(), WandbTracker(project="other").key(), WandbTracker(entity="us").key()]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert keys[0] == "wandb"
    assert len({*keys, WandbTracker().key()}) == 4


@pytest.mark.slow
def test_sessions_without_a_connection_share_no_step(tmp_path, folders):
    """Uploads of sessions with equal steps replace each other. The second session is that of a start after a kill."""
    info = RunInfo("0a1d", "e", "c", {}, tmp_path, "c", ())
    record = {"verdict": "correct", "problem": "p", "chain": 0, "num_tokens": 1, "finish_reason": "stop_id"}
    for counts, records in (((1, 2), []), ((), [record] * 2), ((3, 4), [record] * 4)):
        run = offline(tmp_path).start(info)
        for count in counts:
            run.log({"sample/log_p": -1.0}, count)
        if records:
            run.summary({"accuracy": 1.0}, records)
        run.finish(0)
    steps = [[entry["step"]["num"] for entry in entries(folder, "history")] for folder in runs(tmp_path)]
    assert steps == [[3, 6], [7], [9, 12, 13]]


def test_without_login_it_is_offline_and_does_not_prompt(tracked, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    result, folder = tracked("condition=greedy", "dataset.limit=2")
    assert result.summary["num_samples"] == 2
    assert "W&B is offline (not logged in)" in capsys.readouterr().err
    assert folder.is_dir()
