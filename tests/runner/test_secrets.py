"""Secrets of the environment are in no file that a run, a sweep, a tracker or a report writes, and in no printed text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import HANG
from tests.runs import execute

KEY = "c0ffee" * 6 + "5eed"
SECRETS = {"WANDB_API_KEY": KEY, "HF_TOKEN": "hf_" + "Planted" * 5, "OPENAI_API_KEY": "sk-planted-0123456789abcdef",
           "DFLASH_TEST_JUDGE_KEY": "judge-planted-fedcba987654"}


def found_in(folder) -> list[str]:
    """The files below a folder that have a secret, with its name. Compressed files are not opened."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    assert files
    return [f"{path.relative_to(folder)}: {name}" for path in files for name, secret in SECRETS.items()
            if secret.encode() in path.read_bytes()]


def run(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a module in a folder, which is its home too, with the secrets in its environment."""
    places = {f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("DATA", "CACHE", "CONFIG")}
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=folder, capture_output=True, text=True, check=False,
                          timeout=HANG, env={**os.environ, **SECRETS, **places, "HOME": str(folder / "home")})


def test_the_search_finds_a_secret(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "log").write_text(f"x {KEY} y")
    assert found_in(tmp_path) == ["a/log: WANDB_API_KEY"]


def test_the_files_of_a_run_have_no_secret(make_config, tmp_path, monkeypatch, capfd):
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    execute(make_config("sampler=greedy", "tracker=jsonl", "dataset.limit=1", "dataset.max_new_tokens=8"))
    (tmp_path / "printed").write_text("".join(capfd.readouterr()))
    assert found_in(tmp_path) == []


@pytest.mark.parametrize("options", [
    pytest.param(["tracker=jsonl"], id="jsonl", marks=pytest.mark.slow),
    pytest.param(["tracker=wandb"], id="wandb", marks=pytest.mark.slow),
    pytest.param(["tracker=tensorboard"], id="tensorboard", marks=pytest.mark.slow),
    pytest.param(["tracker=jsonl", "grader=judge", "grader.url=http://127.0.0.1:9", "grader.model=none",
                  "grader.api_key_env=DFLASH_TEST_JUDGE_KEY"], id="judge", marks=pytest.mark.slow),
    pytest.param(["tracker=jsonl", "-m", "seed=0,1"], id="sweep", marks=pytest.mark.slow),
])
def test_nothing_that_is_written_has_a_secret(tmp_path, options):
    done = run(tmp_path, "dflash_mcmc", "sampler=greedy", "dataset.limit=1", "dataset.max_new_tokens=8", *options)
    printed = done.stdout + done.stderr
    judged = "grader=judge" in options
    assert judged or done.returncode == 0, done.stderr
    assert judged or list(tmp_path.glob("outputs/**/records.jsonl"))
    if not judged:
        report = run(tmp_path, "dflash_mcmc.report", "outputs")
        assert report.returncode == 0, report.stderr
        printed += report.stdout + report.stderr
    (tmp_path / "printed").write_text(printed)
    assert found_in(tmp_path) == []
