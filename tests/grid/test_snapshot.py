"""What jobs run is what was submitted: configurations come back whole, and later edits are without effect."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dflash_mcmc.catalogue import options
from dflash_mcmc.config import command
from dflash_mcmc.config.identity import identity_hash, identity_of
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.errors import UserError
from dflash_mcmc.grid import snapshot
from tests import processes
from tests.config.test_schema import companions
from tests.test_registry import PLUGIN, install

TASK = '{"id": "a", "question": "How much is 1 + 1?", "answer": "2"}\n'
_NEED_FILES = ("model=hf", "model=qwen3_4b", "draft=dflash", "dataset=aime24", "dataset=aime25", "dataset=math500",
               "dataset=gsm8k", "dataset=clbench", "dataset=humaneval", "dataset=livecodebench", "dataset=mbpp")


def there_and_back(config, folder):
    snapshot.write_point(folder / "point.yaml", config, folder / "code")
    return snapshot.read_point(folder / "point.yaml")


def _choices() -> Iterator[object]:
    """Every option of every group; the first of each without the marker `slow`."""
    for group, names in options().items():
        choices = [f"{group}={name}" for name in names if not name.startswith("slurm")]
        first, *others = [choice for choice in choices if choice not in _NEED_FILES]
        yield first
        yield from (pytest.param(choice, marks=pytest.mark.slow) for choice in others)


@pytest.mark.slow
@pytest.mark.parametrize("choice", list(_choices()))
def test_every_option_comes_back(make_config, tmp_path, monkeypatch, choice):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(TASK)
    (tmp_path / "code" / PACKAGE.name).mkdir(parents=True)
    (tmp_path / "code" / PACKAGE.name / "assets").symlink_to(PACKAGE / "assets")
    try:
        config = make_config(choice, *companions(choice))
        identity = identity_of(config)
    except UserError as error:
        assert "hub" in str(error)  # noqa: PT017
        return
    back = there_and_back(config, tmp_path)
    assert identity_of(back) == identity
    assert back.label() == config.label()
    for name in ("hardware", "tracker", "grader", "sampler", "decoder", "probe", "condition"):
        assert dataclasses.asdict(getattr(back, name)) == dataclasses.asdict(getattr(config, name))


def test_relative_paths_mean_the_same_elsewhere(make_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(TASK)
    config = make_config("paths.outputs=out", "dataset=jsonl", "dataset.path=tasks.jsonl", "sampler=greedy", "tracker=wandb")
    snapshot.write_point(tmp_path / "point.yaml", config, tmp_path / "code")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / PACKAGE.name).symlink_to(PACKAGE)
    monkeypatch.chdir(tmp_path / "elsewhere")
    back = snapshot.read_point(tmp_path / "point.yaml")
    assert back.paths.outputs == back.tracker.folder == str(tmp_path / "out")
    assert back.dataset.path == str(tmp_path / "tasks.jsonl")
    assert back.model.path.startswith(str(tmp_path / "code"))
    monkeypatch.chdir(tmp_path)
    digest = identity_hash(config)
    snapshot.check_identity(back, digest)
    (tmp_path / "tasks.jsonl").write_text(TASK.replace("1 + 1", "2 + 0"))
    with pytest.raises(UserError, match="has changed since the grid was submitted"):
        snapshot.check_identity(back, digest)


def test_the_copy_is_complete_and_comes_before_the_checkout(tmp_path):
    """A process in the checkout, with the checkout on its path, runs the copy, and composes with the copy's conf."""
    snapshot.copy_code(tmp_path / "code")
    root = command.config_folder().parent
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'code'}:{root}", "PYTHONSAFEPATH": "1"}
    code = "import dflash_mcmc.config.command as c; c.prepare(); print(c.__file__, c.config_folder())"
    shown = subprocess.run([sys.executable, "-c", code],
                           cwd=root, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert all(path.startswith(str(tmp_path / "code")) for path in shown)
    copied = {path.relative_to(tmp_path / "code" / "conf") for path in (tmp_path / "code" / "conf").rglob("*.yaml")}
    assert copied == {path.relative_to(command.config_folder()) for path in command.config_folder().rglob("*.yaml")}
    assert not list((tmp_path / "code").rglob("__pycache__"))
    done = subprocess.run([sys.executable, "-m", "dflash_mcmc.grid.work", str(tmp_path), "0"], cwd=root, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "grid.json: cannot be read" in done.stderr


def test_a_run_of_the_copy_names_the_commit_that_was_submitted(tmp_path):
    from dflash_mcmc.runner.provenance import commit

    snapshot.copy_code(tmp_path / "code")
    program = ("from dflash_mcmc.config import schema; from dflash_mcmc.runner import provenance; "
               "print(schema.PACKAGE.parent, provenance.commit()['commit'])")
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(tmp_path / "code")},
                          cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "code"), str(commit()["commit"])]


def test_a_plugin_is_copied_with_its_entry_points(tmp_path):
    """A package and a module, of which only the package is an entry point. The original is gone when the copy is used."""
    plugin, code = tmp_path / "plugin", tmp_path / "code"
    plugin.mkdir()
    install(plugin, PLUGIN)
    content = (plugin / "elsewhere.py").read_text()
    (plugin / "elsewhere.py").unlink()
    (plugin / "elsewhere").mkdir()
    (plugin / "elsewhere" / "__init__.py").write_text(content)
    (plugin / "beside.py").write_text("")
    (plugin / "elsewhere-1.0.dist-info" / "top_level.txt").write_text("elsewhere\nbeside\ngone\n")
    run_with(plugin, "from dflash_mcmc.grid.snapshot import copy_plugins; from pathlib import Path\n"
                     f"path = Path({str(code)!r}); path.mkdir(); copy_plugins(path)")
    shutil.rmtree(plugin)
    shown = run_with(code, "import beside; from dflash_mcmc import registry; print(beside.__file__)\n"
                           "print(registry.components('sampler')['elsewhere'].file)").split()
    assert shown == [str(code / "beside.py"), str(code / "elsewhere" / "__init__.py")]


def run_with(folder, program: str) -> str:
    """The output of a program that finds the modules of a folder."""
    done = processes.run(["-c", program], folder, PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout
