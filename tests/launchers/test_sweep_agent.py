"""`launchers/sweep.yaml`: real `wandb sweep` and `wandb agent` commands with a server on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.launchers.sweep_server import SweepServer
from tests.processes import HANG

BIN = Path(sys.executable).parent
GROUPS = {"experiment=guided_power_sampling": "experiment=demo"}


@pytest.fixture
def server():
    with SweepServer() as server:
        yield server


def make_sweep(server: SweepServer, folder: Path, more: list[str], **parameters: list) -> tuple[str, dict[str, str]]:
    """Edits the file as a user would, and creates the sweep: (ENTITY/PROJECT/ID, environment for its agents)."""
    sweep = yaml.safe_load((ROOT / "launchers/sweep.yaml").read_text())
    assert set(parameters.keys()) == {name.rpartition(".")[2] for name in sweep["parameters"]}
    sweep["parameters"] = {name: {"values": parameters[name.rpartition(".")[2]]} for name in sweep["parameters"]}
    sweep["command"] = [GROUPS.get(word, word) for word in sweep["command"]]
    sweep["command"][-1:-1] = more
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**inherited, **server.environment(folder), "PATH": f"{BIN}:{os.environ['PATH']}", "WANDB_SILENT": "false",
                   "PYTHONPATH": str(ROOT)}
    made = subprocess.run([BIN / "wandb", "sweep", "sweep.yaml"], cwd=folder, capture_output=True, text=True, env=environment,
                          timeout=HANG)
    assert made.returncode == 0, made.stderr
    return made.stderr.rpartition("wandb agent ")[2].strip(), environment


@pytest.mark.slow
def test_an_agent_draws_the_points_of_a_sweep_in_its_runs(server, tmp_path):
    more = ["dataset.limit=2", "dataset.max_new_tokens=16"]
    name, environment = make_sweep(server, tmp_path, more, alpha=[2, 4], beta=[0.1])
    assert name == "tester/dflash_mcmc/sweep1"
    agent = subprocess.run([BIN / "wandb", "agent", "--count", "2", name], cwd=tmp_path, capture_output=True, text=True,
                           env=environment, timeout=HANG)
    assert agent.returncode == 0, agent.stderr
    assert list(server.runs) == [("dflash_mcmc", "sweep1-0"), ("dflash_mcmc", "sweep1-1")]
    assert server.of_sweep == {"sweep1-0": "sweep1", "sweep1-1": "sweep1"}
    blended, other = (server.run(run) for run in ("sweep1-0", "sweep1-1"))
    assert (blended.exit_code, other.exit_code) == (0, 0)
    assert other.config["sampler"]["value"]["alpha"] == 4
    # The configuration has the names of the sweep, for its charts, in addition to ours.
    assert blended.config["sampler.alpha"]["value"] == blended.config["sampler"]["value"]["alpha"] == 2
    assert blended.config["blend.beta"]["value"] == blended.config["blend"]["value"]["beta"] == 0.1
    (folder,) = (tmp_path / "outputs/demo").glob(f"layer-power_mh-*{blended.config['identity']['value']}")
    assert blended.summary["accuracy"] == json.loads((folder / "summary.json").read_text())["accuracy"]
    assert [row["finished"] for row in blended.history if "sample/log_p" in row] == [1, 2]
    assert server.unknown == []
