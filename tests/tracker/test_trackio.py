"""`tracker=trackio`: its database has the sweep."""

import json
import sqlite3

import pytest

from tests import processes

SWEEP = ["-m", "dflash_mcmc", "-m", "condition=blend_ps,temp", "blend.beta=0,0.05", "sampler.alpha=2,4",
         "sampler.temperature=0.25,1", "sampler.num_steps=1", "dataset.limit=4", "dataset.max_new_tokens=24", "name=sweep"]


@pytest.mark.slow
def test_a_sweep_without_an_account_is_on_the_dashboard(tmp_path):
    """Over beta, alpha and temperature, without the name of a tracker, started twice."""
    dashboard = tmp_path / "outputs" / "trackio"
    for command in ([*SWEEP, "dataset.limit=2"], [*SWEEP, "dataset.stop=[]"]):  # another name, and the same runs
        done = processes.run(command, tmp_path, HOME=str(tmp_path), WANDB_MODE="", TRACKIO_DIR=str(dashboard))
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("dashboard: TRACKIO_DIR=") == 1
        assert "Trackio" not in done.stdout
    with sqlite3.connect(next(dashboard.glob("*.db"))) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step, id").fetchall()
    runs: dict[str, list[dict]] = {}
    for name, step, metrics in rows:
        runs.setdefault(name, []).append({"step": step, **json.loads(metrics)})
    summaries = {path.parent.name[-12:][:6]: json.loads(path.read_text())
                 for path in tmp_path.glob("outputs/sweep/*/summary.json")}
    shown = [" ".join(word for word in name.split()[:-1] if not word.startswith(("max", "num"))) for name in sorted(runs)]
    assert shown == [
        "blend_ps beta=0 alpha=2", "blend_ps beta=0 alpha=4", "blend_ps beta=0.05 alpha=2", "blend_ps beta=0.05 alpha=4",
        "temp temperature=0.25", "temp temperature=1"]
    for name, lines in runs.items():
        samples = [line for line in lines if "sample/correct" in line]
        assert [line["step"] for line in samples] == [1, 2, 3, 4], "each sample once, over two starts"
        ends = [line for line in lines if "summary/accuracy" in line]
        summary = summaries[name.rpartition(" ")[2]]
        assert ends[-1]["summary/accuracy"] == samples[-1]["running/accuracy"] == summary["accuracy"]
        table = ends[-1]["samples"]
        assert table["_type"] == "trackio.table"
