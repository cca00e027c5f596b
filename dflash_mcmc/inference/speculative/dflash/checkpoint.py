"""Checkpoints of DFlash drafts: a folder with config.json and safetensors, in the published layout.

Source: DFlash (arXiv 2602.06036).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dflash_mcmc.errors import UserError
from dflash_mcmc.inference.speculative.dflash.config import FIELD, read_shape, refuse, to_config
from dflash_mcmc.inference.speculative.dflash.network import DFlash
from dflash_mcmc.inference.speculative.dflash.shape import DFlashShape
from dflash_mcmc.store.files import write_atomically

_WEIGHTS = "model.safetensors"
_FLOATS = ("F32", "F16", "BF16")
_DFLASH2 = ("candidate_selector.", "attention_conv.", "mlp_conv.")


def load(folder: Path, dtype: torch.dtype | None, device: torch.device | str) -> DFlash:
    """The draft of a folder, in eval mode, with fixed weights.

    Args:
        dtype: dtype of the weights; None keeps the checkpoint's.

    Raises:
        UserError: for the reasons of `read_shape`, or if there are no weights, or if weights are damaged, unexpected,
            missing, or of another shape than the config's.
    """
    shape = read_shape(folder)
    draft, files = check_tensors(folder)
    tensors = {name: _open(folder, file).get_tensor(name).to(device, dtype or shape.dtype) for name, file in files.items()}
    draft.load_state_dict(tensors, assign=True)
    return draft.eval().requires_grad_(False)


def check_tensors(folder: Path) -> tuple[DFlash, dict[str, Path]]:
    """Checks the headers of a folder's tensors against its config. Raises UserError for the reasons of `load`.

    Returns:
        The network without weights, and the file of each tensor.
    """
    with torch.device("meta"):
        draft = DFlash(read_shape(folder))
    files = _tensor_files(folder)
    _check_tensors(folder, files, {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()})
    return draft, files


def save(draft: DFlash, folder: Path, extra: dict[str, Any] | None = None) -> None:
    """Writes config.json and model.safetensors in the dtype of the weights, for `read_shape` and `load`.

    Each file is replaced as a whole. In a new folder config.json is written last.

    Args:
        extra: further fields of the config, such as vocab_size; the shape's fields take precedence.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    dtype = next(draft.parameters()).dtype
    config = json.dumps({**(extra or {}), **to_config(draft.shape), "dtype": str(dtype).removeprefix("torch.")}, indent=2)
    temporary = folder / f".{_WEIGHTS}.{os.getpid()}.tmp"
    save_file({name: tensor.contiguous() for name, tensor in draft.state_dict().items()}, temporary, {"format": "pt"})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.chmod(0o644)  # safetensors makes files that only the owner can read, but checkpoints are shared
    os.replace(temporary, folder / _WEIGHTS)
    write_atomically(folder / "config.json", config + "\n")


def check_pair(shape: DFlashShape, *, hidden_size: int, vocab_size: int, num_layers: int, field: str = FIELD) -> None:
    """Checks that a draft fits a target of this hidden size, vocabulary and number of layers. Raises UserError."""
    last = max(shape.target_layers)
    for wrong, found, allowed in (
        (shape.hidden_size != hidden_size, f"has hidden size {shape.hidden_size}", f"{hidden_size}, the target's"),
        (shape.num_target_layers not in (None, num_layers), f"was trained for a target of {shape.num_target_layers} layers",
         f"{num_layers}, the target's"),
        (last >= num_layers, f"reads layer {last} of the target", f"0 to {num_layers - 1}, the target's layers"),
        (shape.mask_token_id >= vocab_size, f"has mask_token_id {shape.mask_token_id}",
         f"an id below {vocab_size}, the size of the target's vocabulary"),
    ):
        if wrong:
            raise UserError(f"{field}: the draft {found}; allowed: {allowed}")


def _tensor_files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor: model.safetensors, or a shard that the index names. Raises UserError."""
    index = folder / f"{_WEIGHTS}.index.json"
    files = [folder / _WEIGHTS]
    if not files[0].is_file():
        if not index.is_file():
            refuse(folder, f"has no {_WEIGHTS}", f"that file, or shards with {index.name}")
        try:
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            refuse(folder, f"has an {index.name} that cannot be read ({error!r:.80})", "JSON with a weight_map")
    return {name: file for file in files for name in list(_open(folder, file).keys())}


def _open(folder: Path, file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = "is not there" if not file.is_file() else f"is not whole ({error!s:.80})"
        refuse(folder, f"has a file {file.name} that {reason}", "safetensors files as they were published")


def _check_tensors(folder: Path, files: dict[str, Path], expected: dict[str, tuple[int, ...]]) -> None:
    """Checks that a checkpoint has exactly the tensors that its config requires. Raises UserError."""
    more, fewer = sorted(files.keys() - expected), sorted(expected.keys() - files)
    if any(part in name for name in more for part in _DFLASH2):
        refuse(folder, "is a DFlash 2 checkpoint (it has a candidate selector or convolutions)", "DFlash, the first version")
    if more:
        refuse(folder, f"has tensors that DFlash lacks: {_some(more)}", f"the {len(expected)} tensors of its config")
    if fewer:
        refuse(folder, f"lacks {_some(fewer)}", f"all {len(expected)} tensors of its config")
    for name, shape in expected.items():
        entry = _open(folder, files[name]).get_slice(name)
        if tuple(entry.get_shape()) != shape:
            refuse(folder, f"has {name} of shape {tuple(entry.get_shape())}", f"{shape}, which its config.json gives")
        if entry.get_dtype() not in _FLOATS:
            refuse(folder, f"has {name} in {entry.get_dtype()}", ", ".join(_FLOATS))


def _some(names: Iterable[str]) -> str:
    """The first three names, for an error message."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
