"""Known mistakes, planted in copies of the embedded checkpoints: by edits of config.json, or by changes of tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dflash_mcmc.config.schema import PACKAGE

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]


def planted(folder: Path, asset: str, config: Callable[[Config], None] = lambda values: None,
            tensors: Callable[[Tensors], None] = lambda values: None) -> Path:
    """A copy of an embedded checkpoint with an edited config.json and edited tensors (float32)."""
    source = PACKAGE / "assets" / asset
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    values, weights = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    weights = {name: tensor.float() for name, tensor in weights.items()}
    config(values)
    tensors(weights)
    (folder / "config.json").write_text(json.dumps({**values, "dtype": "float32"}))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def own(**changes: object) -> Callable[[Config], None]:
    """An edit of fields of dflash_config."""
    return lambda values: values["dflash_config"].update(changes)


def without_heads(values: Config) -> None:
    """A DSpark config as one of DFlash, whose rows predict their own places."""
    values["architectures"] = ["DFlashDraftModel"]
    values["dflash_config"] = {name: values["dflash_config"][name] for name in ("mask_token_id", "target_layer_ids")}


def drop_heads(tensors: Tensors) -> None:
    """Takes the Markov head away, and the confidence head, which no network reads."""
    for name in [name for name in tensors if "_head." in name]:
        del tensors[name]


def from_anchor(values: Config) -> None:
    """A DFlash config as one of DSpark without heads, whose rows predict the place after their own."""
    values["architectures"] = ["DSparkDraftModel"]
    values["dflash_config"].update(projector_type="dspark", markov_rank=0, sample_from_anchor=True)
