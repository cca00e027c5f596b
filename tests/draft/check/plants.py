"""Known mistakes, planted in copies of the embedded checkpoints: by edits of config.json, or by changes of tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dflash_mcmc.config.schema import PACKAGE

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
HIDDEN = 128
CHANNELS = torch.exp(torch.linspace(-3.0, 3.0, HIDDEN))[torch.arange(HIDDEN) * 37 % HIDDEN]
"""Scales of channels from 0.05 to 20."""


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


def top(**changes: object) -> Callable[[Config], None]:
    """An edit of fields at the top level."""
    return lambda values: values.update(changes)


def without_heads(values: Config) -> None:
    """A DSpark config as one of DFlash, whose rows predict their own places."""
    values["architectures"] = ["DFlashDraftModel"]
    values["dflash_config"] = {name: values["dflash_config"][name] for name in ("mask_token_id", "target_layer_ids")}


def drop_heads(tensors: Tensors) -> None:
    """Takes the Markov and the confidence head away."""
    for name in [name for name in tensors if "_head." in name]:
        del tensors[name]


def from_anchor(values: Config) -> None:
    """A DFlash config as one of DSpark without heads, whose rows predict the place after their own."""
    values["architectures"] = ["DSparkDraftModel"]
    values["dflash_config"].update(projector_type="dspark", markov_rank=0, enable_confidence_head=False,
                                   sample_from_anchor=True)


def exchange_features(one: int, two: int) -> Callable[[Tensors], None]:
    """Exchanges the columns of two features in the projection."""

    def edit(tensors: Tensors) -> None:
        parts = list(tensors["fc.weight"].split(HIDDEN, dim=1))
        parts[one], parts[two] = parts[two], parts[one]
        tensors["fc.weight"] = torch.cat(parts, dim=1)

    return edit


def expects_normed(rms: torch.Tensor) -> Callable[[Tensors], None]:
    """Makes a draft for the target of `other_head`, whose projection expects features after that target's final norm.

    Args:
        rms: (features,), the usual root mean square of each feature, which the norm divides by.
    """
    weight = load_file(PACKAGE / "assets/tiny/model.safetensors")["model.norm.weight"].float() * CHANNELS

    def edit(tensors: Tensors) -> None:
        tensors["fc.weight"] = tensors["fc.weight"] * torch.cat([size / weight for size in rms])
        tensors["norm.weight"] = tensors["norm.weight"] * CHANNELS

    return edit


def large_projection(tensors: Tensors) -> None:
    """Weights above float16's largest number. The norm after the projection takes their scale away."""
    tensors["fc.weight"] = tensors["fc.weight"] * 1e7


def other_head(tensors: Tensors) -> None:
    """Another head that gives the target the same laws: the final norm has the inverse of its scale of each channel."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] / CHANNELS
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * CHANNELS
