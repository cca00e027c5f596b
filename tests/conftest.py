"""Shared fixtures. No test uses a network, and every run writes below a temporary folder."""

from __future__ import annotations

import gc
import os
import subprocess
from pathlib import Path

import pytest
from hydra import initialize_config_dir

os.environ.update({
    "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false",
    "WANDB__DISABLE_STATS": "true", "TOKENIZERS_PARALLELISM": "false",
})

from dflash_mcmc.config import command as cli
from dflash_mcmc.config.checks import to_config
from dflash_mcmc.config.schema import Config
from tests import processes

gc.set_threshold(50_000, 20, 10)  # with the defaults, garbage collection takes a quarter of the time for a configuration

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
"""Real data next to the checkout. Tests that need it are skipped if it is missing."""


@pytest.fixture
def make_config(tmp_path):
    """A function from overrides to a typed configuration. Outputs are below the test's folder; the default tracker is none."""
    cli.prepare()

    def make(*overrides: str) -> Config:
        defaults = [f"paths.outputs={tmp_path}"]
        if not any(text.startswith("tracker=") for text in overrides):
            defaults.append("tracker=none")
        with initialize_config_dir(str(cli.config_folder()), version_base="1.3"):
            return to_config(cli.compose_checked("config", [*defaults, *overrides]))

    return make


@pytest.fixture
def command(tmp_path):
    """A function that runs a command in a separate process: command("dflash_mcmc", "sampler=greedy")."""

    def run(module: str, *arguments: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
        return processes.run(["-m", module, *arguments], tmp_path, timeout, **environment)

    return run


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real data. Skips the test if it is missing."""
    if not SHARED.is_dir():
        pytest.skip(f"real data not found at {SHARED}")
    return SHARED
