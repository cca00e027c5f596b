"""Broken checkpoints are errors of one line that name the field, the given value and the allowed ones. Nothing is written."""

import json
import os
import pickle
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import dflash_mcmc as dm
from dflash_mcmc.config.schema import PACKAGE, Job
from dflash_mcmc.dataset.inputs import sources
from dflash_mcmc.errors import UserError
from dflash_mcmc.model.files import stop_ids_of
from dflash_mcmc.runner import plan
from tests.model.damage import all_ways
from tests.model.trying import tried
from tests.refusals import refused
from tests.runs import execute

TINY = PACKAGE / "assets" / "tiny"
DEEP = "[" * 100_000
WEIGHTS = "model.safetensors"


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the embedded checkpoint, which tests can change."""
    return shutil.copytree(TINY, tmp_path / "checkpoint")


@pytest.fixture
def refuses(make_config, checkpoint, tmp_path):
    """A function that expects an error of one line from the checks before a start, and no file."""

    def expect(*parts: str) -> None:
        with refused(*parts, start="model."):
            plan.check([Job(make_config(f"model.path={checkpoint}", "sampler=greedy", "dataset.limit=1"))])
        assert not list(tmp_path.glob("default/*"))

    return expect


def with_header(file, change) -> None:
    """Replaces the header of a safetensors file by what `change` makes of it."""
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = change(json.loads(raw[8:8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length:])


def changed(file, **values) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("header", [[1, 2], 5, None, b"{", b"\xff\xfe", DEEP.encode(), {"a": 5}, {}],
                         ids=["list", "number", "null", "text", "bytes", "deep", "no tensor", "empty"])
def test_a_header_that_is_no_mapping_of_tensors(checkpoint, refuses, header):
    with_header(checkpoint / WEIGHTS, lambda _: header)
    refuses(WEIGHTS, "allowed: a complete safetensors file")


@pytest.mark.parametrize("entry", [
    {"data_offsets": value} for value in (
        [-5, 10], ["a", "b"], [0, 2**70], [2**62, 2**63], [100, 0], [0.5, 10], [0], [0, 1, 2], [False, True], [[0], [1]], 7,
        [0, float("inf")], None)
] + [{"shape": value} for value in ([-1, 4], [2**62, 2**62], "ab", [1.5], None)] + [
    pytest.param({}, id="two tensors in one place")], ids=str)
def test_offsets_and_shapes_that_are_no_counts_or_overlap(checkpoint, refuses, entry):
    def change(header):
        name, other = [name for name in header if name.endswith("norm.weight")][:2]
        return {**header, name: {**header[name], **entry} if entry else header[other]}

    with_header(checkpoint / WEIGHTS, change)
    refuses(WEIGHTS, "allowed: a complete safetensors file")


@pytest.mark.parametrize("length", [0, 2**40, 2**64 - 1])
def test_a_length_of_the_header_beyond_the_file(checkpoint, refuses, length):
    raw = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(struct.pack("<Q", length) + raw[8:])
    refuses(WEIGHTS, "allowed: a complete safetensors file")


@pytest.mark.parametrize(("file", "message"), [
    (WEIGHTS, "cannot load"), ("tokenizer.json", "cannot load"), ("config.json", "a folder with config.json")])
def test_a_file_that_is_not_there(make_config, checkpoint, tmp_path, file, message):
    (checkpoint / file).unlink()
    with refused(message, start="model"):
        execute(make_config(f"model.path={checkpoint}", "sampler=greedy", "dataset.limit=1"))
    assert not list(tmp_path.glob("default/*"))


def _without(*parts):
    return lambda tensors: {name: value for name, value in tensors.items() if not any(part in name for part in parts)}


@pytest.mark.parametrize(("change", "values", "message"), [
    (_without("layers.3.mlp.up_proj"), {}, "lacks weights of its config.json: model.layers.3.mlp.up_proj.weight; allowed"),
    (_without("layers.7."), {}, "lacks weights of its config.json: model.layers.7.input_layernorm.weight, "),
    (_without("model."), {}, "lacks weights of its config.json: "),
    (_without(), {"num_hidden_layers": 9, "layer_types": None}, "lacks weights of its config.json: model.layers.8."),
    (_without(), {"num_hidden_layers": 7, "layer_types": None}, "has weights that its config.json has no place for: model.l"),
    (_without(), {"tie_word_embeddings": False}, "lacks weights of its config.json: lm_head.weight; allowed: a checkpoint "),
    (lambda tensors: {**tensors, "model.more": torch.ones(3)}, {}, "no place for: model.more; allowed: their"),
], ids=["tensor", "layer", "all", "more layers", "fewer layers", "untied", "unexpected"])
def test_missing_and_unexpected_weights_are_one_line(checkpoint, change, values, message):
    save_file(change(load_file(checkpoint / WEIGHTS)), checkpoint / WEIGHTS, {"format": "pt"})
    changed(checkpoint / "config.json", **values)
    with refused(message, start="model: given "):
        dm.sample(str(checkpoint), None, ["1"], sampler="greedy", max_new_tokens=2)


def test_weights_that_a_family_ties_or_computes_may_be_there(checkpoint):
    tensors = load_file(checkpoint / WEIGHTS)
    tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    save_file(tensors, checkpoint / WEIGHTS, {"format": "pt"})
    assert dm.sample(str(checkpoint), None, ["1"], sampler="greedy", max_new_tokens=2)


@pytest.mark.parametrize("index", [
    "[]", "{", DEEP, '{"weight_map": [1]}', '{"weight_map": {}}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": ["b"]}}',
    '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": "/x"}}', '{"weight_map": {"a": "b\\u0000"}}',
], ids=lambda text: text[:40])
def test_a_broken_index(checkpoint, refuses, index):
    (checkpoint / WEIGHTS).rename(checkpoint / "model-00001-of-00001.safetensors")
    (checkpoint / f"{WEIGHTS}.index.json").write_text(index)
    refuses(f"{WEIGHTS}.index.json", "allowed: a complete index of safetensors files")


@pytest.mark.parametrize("text", ["[]", "5", "null", "{", DEEP, '{"a": ' + "9" * 5000 + "}"], ids=lambda text: text[:10])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_no_mapping(checkpoint, refuses, file, text):
    (checkpoint / file).write_text(text)
    refuses("given", f"allowed: a folder whose {file} is")


@pytest.mark.parametrize("values", [
    {"num_hidden_layers": "x"}, {"num_hidden_layers": 10**9}, {"hidden_size": 1.5}, {"vocab_size": "x"}, {"model_type": []},
    {"model_type": "nothing"}, {"max_position_embeddings": "x"}, {"rope_parameters": "x"}, {"dtype": 5}, {"dtype": "x"},
    {"layer_types": ["x"]}], ids=str)
def test_fields_of_config_json_of_wrong_types(checkpoint, refuses, values):
    changed(checkpoint / "config.json", **values)
    refuses()


def test_counts_of_config_json_that_are_no_numbers(make_config, checkpoint):
    changed(checkpoint / "config.json", num_hidden_layers="x")
    with refused("a whole number > 0 for num_hidden_layers, and not 'x'", start="model.path: given"):
        make_config(f"model.path={checkpoint}").model.num_layers()


@pytest.mark.parametrize("given", [2**70, "x", 1.5, [[1]], True, [2**70], ["x"], {}, {"a": 1}, [None]], ids=repr)
def test_stop_ids_that_are_no_ids(checkpoint, refuses, given):
    changed(checkpoint / "generation_config.json", eos_token_id=given)
    refuses(f"given eos_token_id {given!r} in generation_config.json; allowed: null, a token id, or a list of token ids")
    with refused(f"given eos_token_id {given!r}", start="model.path: "):
        stop_ids_of([type("Loaded", (), {"eos_token_id": given})])


def test_stop_ids_that_are_ids():
    sources = [type("Loaded", (), {"eos_token_id": given}) for given in (None, 3, [4, 5], (6,), -1, 10**6)]
    assert stop_ids_of(sources) == {3, 4, 5, 6, -1, 10**6}


@pytest.mark.parametrize(("file", "values"), [("tokenizer_config.json", {"model_max_length": "x"}),
                                              ("tokenizer_config.json", {"tokenizer_class": 5}),
                                              ("tokenizer_config.json", {"eos_token": 5}), ("tokenizer.json", {"model": 5}),
                                              ("tokenizer.json", None)])
def test_a_broken_or_truncated_tokenizer(checkpoint, refuses, file, values):
    if values:
        changed(checkpoint / file, **values)
        refuses("model.path: ")
    else:
        os.truncate(checkpoint / file, 3000)
        refuses("cannot load")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json", WEIGHTS])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(checkpoint, refuses, file):
    (checkpoint / file).unlink()
    os.mkfifo(checkpoint / file)
    refuses(f"{file}'; allowed: a regular file, or a link to one")


def test_a_tokenizer_larger_than_the_vocabulary(make_config, checkpoint, refuses, tmp_path):
    tensors, small = load_file(checkpoint / WEIGHTS), 300
    save_file({name: tensor[:small].clone() if tensor.shape[0] == 512 else tensor for name, tensor in tensors.items()},
              checkpoint / WEIGHTS, metadata={"format": "pt"})
    changed(checkpoint / "config.json", vocab_size=small)
    message = "which gives the id 472 for a prompt; allowed: ids from 0 to 299, the model's vocabulary"
    refuses(message)
    with refused(message, start="model.path: given a tokenizer of 473 tokens"):
        execute(make_config(f"model.path={checkpoint}", "sampler=greedy", "dataset.limit=1"))
    assert not list(tmp_path.glob("default/*"))
    with refused("ids from 0 to 299", start="prompts: given 300"):
        dm.sample(str(checkpoint), None, [[1, 300]], sampler="greedy", max_new_tokens=2)


# Checkpoints with random damage: a run ends in a result or in one line, in bounded time.

QUICK, ALL = 12, 100


@pytest.mark.parametrize("damage", [
    pytest.param(damage, id=damage.name[:60].encode("unicode_escape").decode(), marks=[pytest.mark.slow] * (number >= QUICK))
    for number, damage in enumerate(all_ways(22, ALL))])
def test_a_damaged_checkpoint_is_one_line_or_runs(damage, tmp_path, random_weights):
    found = tried(damage, tmp_path)
    assert found.outcome in ("ran", "refused"), found


# Code that a checkpoint or a dataset brings is not run: a payload is planted that would write a file.

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


def refused_or_run(config) -> str | None:
    """The line of a refusal; None if it ran."""
    try:
        plan.check([Job(config)])
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
    sources._loaded.cache_clear()
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
    sources._loaded.cache_clear()
    assert refused_or_run(make_config(*asked)) is None
