"""`tracker=trackio`: its database has the sweep, and its page shows it in a browser."""

import json
import os
import sqlite3
import subprocess
import sys

import pytest

from tests import processes
from tests.report import chromium

SWEEP = ["-m", "dflash_mcmc", "-m", "condition=blend_ps,temp", "blend.beta=0,0.05", "sampler.alpha=2,4",
         "sampler.temperature=0.25,1", "sampler.num_steps=1", "dataset.limit=4", "dataset.max_new_tokens=24", "name=sweep"]
SERVED = "import sys, trackio; print(trackio.show(open_browser=False, block_thread=False)[1], flush=True); sys.stdin.read()"


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep over beta, alpha and temperature on a machine without an account, which names no tracker, started twice."""
    folder = tmp_path_factory.mktemp("swept")
    for command in ([*SWEEP, "dataset.limit=2"], [*SWEEP, "dataset.stop=[]"]):  # another name, and the same runs
        done = processes.run(command, folder, **alone(folder))
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("dashboard: TRACKIO_DIR=") == 1
        assert "Trackio" not in done.stdout
    return folder


def alone(folder) -> dict[str, str]:
    return {"HOME": str(folder), "WANDB_MODE": "", "TRACKIO_DIR": str(folder / "outputs" / "trackio")}


def logged(folder) -> dict[str, list[dict]]:
    """What each run has logged, in the order of its steps."""
    with sqlite3.connect(next((folder / "outputs" / "trackio").glob("*.db"))) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step, id").fetchall()
    found: dict[str, list[dict]] = {}
    for name, step, metrics in rows:
        found.setdefault(name, []).append({"step": step, **json.loads(metrics)})
    return found


@pytest.mark.slow
def test_a_sweep_without_an_account_is_on_the_dashboard(swept):
    summaries = {path.parent.name[-12:][:6]: json.loads(path.read_text())
                 for path in swept.glob("outputs/sweep/*/summary.json")}
    runs = logged(swept)
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


@pytest.mark.slow
def test_a_browser_shows_the_sweep(swept, tmp_path):
    chromium.needed()
    with subprocess.Popen([sys.executable, "-c", SERVED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, **alone(swept)}) as served:
        address = next(line for line in served.stdout if line.startswith("http"))
        page = chromium.browser("--virtual-time-budget=20000", "--window-size=1400,1200", "--dump-dom",
                                f"{address.strip()}?project=dflash_mcmc").stdout
        served.communicate()
    for name in logged(swept):
        assert name in page
    assert "accuracy" in page
