"""Runs every command of the README unchanged, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mcmc.config.schema import PACKAGE
from tests import processes
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
BY_CI = ("make demo", "make test")
ADDED = "  # with the three files above"
NEEDS_GPU = "  # needs a GPU"
NEEDS_SLURM = "  # needs SLURM"  # run by tests/launchers/test_readme.py


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line]
PLAIN = [line for line in COMMANDS if line not in BY_CI and not line.endswith((ADDED, NEEDS_GPU, NEEDS_SLURM))]
FROM_NOTHING = {part.split()[2]: part for line in reversed(PLAIN) for part in line.split(" && ")}.values()
"""The first command of each program. It runs in a new interpreter, all others in forked processes."""


def shell(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs a line in a shell whose `python` is the one of this process."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=600,
                          env={**os.environ, "PATH": path, **environment})


def forked(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs a command `python ...` in a forked process. A shell expands its arguments."""
    noting = "set -e; python() { printf '%s\\0' \"$@\"; }; "
    expanded = subprocess.run(["bash", "-c", noting + command], cwd=folder, capture_output=True, text=True, check=True,
                              env={**os.environ, **environment})
    return processes.run(expanded.stdout.split("\0")[:-1], folder, timeout=600, **environment)


@pytest.fixture
def real_data(tmp_path) -> dict[str, str]:
    """The checkpoint and the two files that a reader has: the embedded checkpoint, and as many rows as in the benchmarks."""
    row = {"problem": "What is 2+3?", "answer": "5", "level": 1, "subject": "Algebra", "solution": ""}
    (tmp_path / "math.jsonl").write_text("".join(json.dumps({**row, "unique_id": f"{n}"}) + "\n" for n in range(500)))
    (tmp_path / "gsm.jsonl").write_text(1319 * (json.dumps({"question": "What is 2+3?", "answer": "#### 5"}) + "\n"))
    checkpoint = shutil.copytree(PACKAGE / "assets/tiny", tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))  # room for 1024 tokens
    return {"CHECKPOINT": str(checkpoint), "MATH500": str(tmp_path / "math.jsonl"),
            "GSM8K": str(tmp_path / "gsm.jsonl")}


def test_the_first_two_commands_are_run_by_ci():
    assert COMMANDS[:2] == list(BY_CI)
    ci = (ROOT / ".ci/run").read_text().splitlines()
    assert all(command in ci for command in BY_CI)


@pytest.mark.parametrize("command", PLAIN)
def test_command(command, tmp_path, real_data):
    for part in command.split(" && "):
        done = (shell if part in FROM_NOTHING else forked)(part, tmp_path, **real_data)
        assert done.returncode == 0, done.stderr[-2000:]
    if ".bench" in command:
        assert "engine step ms" in done.stdout
    elif ".grading" in command:
        assert "| grader=math" in done.stdout
    elif ".regrade" in command:
        assert "0 verdicts changed" in done.stdout
    elif ".train" in command:
        assert "draft written to" in done.stdout
    elif "rejection_sampling" in command:
        assert "| argmax_proposal" in done.stdout
    elif "dry_run=true" in command:
        assert "| total " in done.stdout
    elif " probe=" in command:
        assert re.search(r"probe=(\w+)", command)[1] + ": " in done.stdout
    elif ".catalogue" not in command and " --cfg" not in command and " --info" not in command and " --help" not in command:
        assert "| condition" in done.stdout


ON_GPUS = [line.removesuffix(NEEDS_GPU) for line in COMMANDS if line.endswith(NEEDS_GPU)]


def test_command_for_several_gpus_composes(tmp_path):
    (command,) = [line for line in ON_GPUS if "accelerate" in line]
    assert command.startswith("accelerate launch --multi_gpu --num_processes 8 -m dflash_mcmc ")
    done = forked("python -m dflash_mcmc --cfg job " + command.partition("-m dflash_mcmc ")[2], tmp_path)
    assert "num_chains: 8" in done.stdout


def test_training_of_a_draft_for_a_gpu_composes(tmp_path, monkeypatch):
    from dflash_mcmc.training import recipe

    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"question": "What is 2+3?"}\n')
    (command,) = [line for line in ON_GPUS if ".train" in line]
    assert command == "python -m dflash_mcmc.train draft=dflash model=qwen3_4b prompts.path=prompts.jsonl"
    assert recipe.compose("dflash", command.split()[4:])


@pytest.mark.parametrize("command", [line for line in ON_GPUS if "accelerate" not in line and ".train" not in line])
def test_command_for_a_gpu_composes(command, tmp_path):
    command = command.replace(" -m dflash_mcmc -m ", " -m dflash_mcmc --cfg job ").replace(
        "condition=greedy,temp,ps,blend_greedy,blend_ps,draft_blend_ps", "condition=blend_ps")
    done = forked(command, tmp_path)
    assert done.returncode == 0, done.stderr
    for expected in ("Qwen/Qwen3-4B", "max_new_tokens: 1024", "num_blocks: 16", "num_steps: 2", "alpha: 4.0", "beta: 0.05",
                     "layer: -3", "bfloat16"):
        assert expected in done.stdout


def test_adding_a_sampler(tmp_path):
    """Writes the three files of the README to the paths in their first lines, in a copy of the project."""
    for name in ("dflash_mcmc", "conf", "tests", "pyproject.toml", "README.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path)
    written = []
    for block in blocks("python") + blocks("yaml"):
        place, _, text = block.partition("\n")
        (tmp_path / place.removeprefix("# ")).write_text(text)
        written.append(place)
    assert len(written) == 3
    environment = {"PYTHONPATH": str(tmp_path)}
    (command,) = [line.removesuffix(ADDED) for line in COMMANDS if line.endswith(ADDED)]
    done = forked(command, tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert "likelier_of_two" in done.stdout
    tests = forked("python -m pytest tests/sampler/test_likelier_of_two.py tests/test_names.py", tmp_path, **environment)
    assert tests.returncode == 0, tests.stdout
    listed = forked("python -m dflash_mcmc.catalogue sampler", tmp_path, **environment)
    assert "Two independent draws" in listed.stdout


def test_files_of_the_file_tree_exist():
    tree = next(block for block in re.findall(r"```\n(conf/.*?)```", README, flags=re.DOTALL))
    for name in re.findall(r"[\w/]+\.py", tree):
        assert (PACKAGE / name).is_file(), name
