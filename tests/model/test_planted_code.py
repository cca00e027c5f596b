"""Code that a checkpoint or a dataset brings is not run: a payload is planted that would write a file."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import pytest

from dflash_mcmc.config.schema import PACKAGE, Job
from dflash_mcmc.dataset import hub
from dflash_mcmc.errors import UserError
from dflash_mcmc.runner import preflight
from tests.runs import execute


class _Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def canary(tmp_path):
    """The file that the payloads write."""
    return tmp_path / "canary"


@pytest.fixture
def checkpoint(tmp_path):
    return shutil.copytree(PACKAGE / "assets" / "tiny", tmp_path / "checkpoint")


def refused_or_run(config) -> str | None:
    """The line of a refusal; None if it ran."""
    try:
        preflight.check([Job(config)])
        execute(config)
    except UserError as error:
        return str(error)
    return None


def code(canary) -> str:
    return f"open({str(canary)!r}, 'w').write('run')\n"


def test_the_payloads_work(canary):
    exec(code(canary))
    assert canary.exists()
    canary.unlink()
    pickle.loads(pickle.dumps(_Payload(f"touch '{canary}'")))
    assert canary.exists()


@pytest.mark.parametrize(("file", "classes"), [
    ("config.json", {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"}),
    ("tokenizer_config.json", {"AutoTokenizer": ["planted.Slow", "planted.Fast"]})])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_code_of_a_checkpoint(make_config, checkpoint, canary, file, classes, known):
    (checkpoint / "planted.py").write_text(code(canary))
    for name in {"config.json", file}:
        values = json.loads((checkpoint / name).read_text())
        more = {"auto_map": classes} if name == file else {}
        if not known:
            more |= {"model_type": "planted"} if name == "config.json" else {"tokenizer_class": "Planted"}
        (checkpoint / name).write_text(json.dumps({**values, **more}))
    line = refused_or_run(make_config(f"model.path={checkpoint}", "sampler=greedy", "dataset.limit=1"))
    assert known or (line is not None and line.startswith("model.path: cannot load") and "\n" not in line)
    assert not canary.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "training_args.bin"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside weights"])
def test_pickles_of_a_checkpoint(make_config, checkpoint, canary, name, alone):
    (checkpoint / name).write_bytes(pickle.dumps({"model.norm.weight": _Payload(f"touch '{canary}'")}))
    if alone:
        (checkpoint / "model.safetensors").unlink()
    line = refused_or_run(make_config(f"model.path={checkpoint}", "sampler=greedy", "dataset.limit=1"))
    assert (line is not None and line.startswith("model.path: cannot load")) if alone else line is None
    assert not canary.exists()


def test_the_script_of_a_dataset(make_config, tmp_path, monkeypatch, canary):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hub._loaded.cache_clear()
    folder = tmp_path / "asked"
    folder.mkdir()
    (folder / "asked.py").write_text(code(canary))
    (folder / "test.jsonl").write_text(json.dumps({"question": "2 + 3", "answer": "5"}) + "\n")
    asked = ("dataset=hub", f"dataset.path={folder}", "dataset.max_new_tokens=8", "sampler=greedy")
    line = refused_or_run(make_config(*asked))
    assert line is not None
    assert line.startswith("dataset.path: cannot load")
    assert not canary.exists()
    (folder / "asked.py").unlink()
    hub._loaded.cache_clear()
    assert refused_or_run(make_config(*asked)) is None
