"""A tensor is read from the file that the index assigns it to, whatever another file holds under its name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.draft.network import checkpoint
from dflash_mcmc.errors import UserError
from dflash_mcmc.model.hf import _load

TARGET, DRAFT = PACKAGE / "assets" / "tiny", PACKAGE / "assets" / "tiny_draft"


def divided(source, folder, stale: str):
    """The checkpoint in two files; `stale` is the one that also holds zeros under the name of a tensor of the other."""
    shutil.copytree(source, folder)
    whole = folder / "model.safetensors"
    weights = load_file(whole)
    whole.unlink()
    names = sorted(weights)
    parts = {"a": names[: len(names) // 2], "b": names[len(names) // 2 :]}
    assigned = {name: f"model-{part}.safetensors" for part, own in parts.items() for name in own}
    for part, own in parts.items():
        held = {name: weights[name] for name in own}
        if part == stale:
            other = max((name for name in names if name not in own), key=lambda name: weights[name].numel())
            held[other] = torch.zeros_like(weights[other])
        save_file(held, folder / f"model-{part}.safetensors", {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": assigned}))
    return folder


@pytest.mark.parametrize("stale", ["", "a", "b"])
def test_the_index_decides(tmp_path, stale):
    before = {path.name for path in tmp_path.parent.iterdir()}
    expected = checkpoint.load(DRAFT, None, "cpu").state_dict()
    found = checkpoint.load(divided(DRAFT, tmp_path / "draft", stale), None, "cpu").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    source = divided(TARGET, tmp_path / "target", stale)
    mine, theirs = (_load.__wrapped__(str(folder), None, "auto", "cpu", None, None).decoder.state_dict()
                    for folder in (source, TARGET))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    assert {path.name for path in tmp_path.parent.iterdir()} == before


def test_a_tensor_that_its_file_lacks_is_named(tmp_path):
    folder = divided(DRAFT, tmp_path / "draft", "")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["fc.weight"] = next(name for name in ("model-a.safetensors", "model-b.safetensors")
                                              if name != content["weight_map"]["fc.weight"])
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"lacks fc\.weight"):
        checkpoint.load(folder, None, "cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_weights_of_8_bits_without_a_quantization_are_named(tmp_path, dtype):
    for source, load in ((TARGET, lambda folder: _load.__wrapped__(str(folder), None, "auto", "cpu", None, None)),
                         (DRAFT, lambda folder: checkpoint.load(folder, None, "cpu"))):
        folder = tmp_path / source.name
        shutil.copytree(source, folder)
        weights = load_file(folder / "model.safetensors")
        name = next(name for name in sorted(weights) if name.endswith("down_proj.weight"))
        weights[name] = weights[name].to(dtype)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=rf"has {name} in [IUF]8.*; allowed: ") as caught:
            load(folder)
        assert "\n" not in str(caught.value)
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
        with pytest.raises(UserError, match=rf"has {name} in {str(dtype).removeprefix('torch.')}.*; allowed: "):
            load(folder)
