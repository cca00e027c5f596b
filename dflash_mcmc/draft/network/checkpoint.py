"""Checkpoints of DFlash drafts: a folder with config.json and safetensors, in the published layout.

Source: DFlash (arXiv 2602.06036).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dflash_mcmc.draft.network.config import FIELD, DraftConfig, read_shape, refuse, to_config
from dflash_mcmc.draft.network.dflash import DFlash, NetworkShape, target_ids
from dflash_mcmc.errors import UserError
from dflash_mcmc.model.files import DamagedError, precision_name, weight_map
from dflash_mcmc.store.files import write_atomically

_WEIGHTS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_INTEGERS = ("I64", "I32")
_FLOATS = ("F32", "F16", "BF16")
_DFLASH2 = ("candidate_selector.", "attention_conv.", "mlp_conv.")


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""Tensors of the target that a checkpoint may repeat. They are not loaded; `check_copies` compares them."""
_UNREAD = ("t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of the speculators library that the network does not need. d2t is one of them with a whole vocabulary."""


class Family(NamedTuple):
    """A kind of draft network whose checkpoints have the layout of DFlash's."""

    config: type[DraftConfig]
    """How config.json is read."""
    network: type[Any]
    to_config: Callable[[Any], dict[str, Any]] | None
    """The published spelling of a shape; None for networks that are not written."""
    prefix: tuple[str, str] = ("", "")
    """Another prefix of the names of tensors, and what takes its place."""

    def read_shape(self, folder: Path) -> Any:
        """See `config.read_shape`."""
        return read_shape(folder, self.config)

    def named(self, name: str) -> str:
        """The network's name of a tensor that a checkpoint calls `name`."""
        old, new = self.prefix
        return new + name.removeprefix(old) if name.startswith(old) else name

    def published(self, name: str) -> str:
        """The name in a checkpoint of a tensor that the network calls `name`."""
        old, new = self.prefix
        return old + name.removeprefix(new) if new and name.startswith(new) else name


DFLASH = Family(DraftConfig, DFlash, to_config)


def load(folder: Path, dtype: torch.dtype | None, device: torch.device | str, family: Family = DFLASH) -> Any:
    """The draft of a folder, in eval mode, with fixed weights.

    Args:
        dtype: dtype of the weights; None keeps the checkpoint's.
        family: the kind of network.

    Raises:
        UserError: for the reasons of `read_shape`, or if there are no weights, or if weights are damaged, unexpected,
            missing, or of another shape than the config's.
    """
    draft, places = check_tensors(folder, family)
    dtype = dtype or draft.shape.dtype
    tensors = {name: _open(folder, place.file).get_tensor(place.name) for name, place in places.items()}
    draft.load_state_dict({name: tensor.to(device, dtype if tensor.is_floating_point() else torch.int64)
                           for name, tensor in tensors.items()}, assign=True)
    if draft.shape.draft_vocab_size is not None:
        _check_tokens(folder, draft)
    return draft.eval().requires_grad_(False)


class TensorPlace(NamedTuple):
    """Where a tensor is stored: the file, and its name there."""

    file: Path
    name: str


def check_tensors(folder: Path, family: Family = DFLASH) -> tuple[Any, dict[str, TensorPlace]]:
    """Checks the headers of a folder's tensors against its config. Raises UserError for the reasons of `load`.

    Returns:
        The network without weights, and the place of each of its tensors.
    """
    with torch.device("meta"):
        draft = family.network(family.read_shape(folder))
    expected = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    ignored = (EMBEDDING, HEAD, *(_UNREAD if family.config.speculators else ()))
    places = {family.named(name): place for name, place in _places(folder).items()
              if family.named(name) in expected or name not in ignored}
    _check_tensors(folder, family, places, expected)
    return draft, places


def _check_tokens(folder: Path, draft: DFlash) -> None:
    """Checks that the tokens of a reduced vocabulary are tokens of the target, each once. Raises UserError."""
    ids, size = target_ids(draft), draft.shape.vocab_size
    if size is None or not bool(((ids >= 0) & (ids < size)).all()) or len(ids.unique()) < len(ids):
        refuse(folder, "has a d2t that maps no two tokens of the draft to different tokens of the target",
               f"places + d2t that are different ids from 0 to {(size or 0) - 1}")


def check_copies(folder: Path, target: dict[str, torch.Tensor]) -> None:
    """Checks that the tensors that a checkpoint repeats equal the target's. Raises UserError.

    Args:
        target: the target's tensors by their names in the checkpoint.
    """
    for name, place in _places(folder).items():
        if name not in target:
            continue
        theirs, ours = _open(folder, place.file).get_tensor(place.name), target[name]
        if theirs.shape != ours.shape:
            refuse(folder, f"has {name} of shape {tuple(theirs.shape)}", f"{tuple(ours.shape)}, the target's")
        same = all(torch.equal(a, b.to("cpu", a.dtype)) for a, b in zip(theirs.split(8192), ours.split(8192), strict=True))
        if not same:
            refuse(folder, f"has another {name} than the target: it is a draft for other weights", "the target's own draft")


def save(draft: torch.nn.Module, folder: Path, extra: dict[str, Any] | None = None, family: Family = DFLASH) -> None:
    """Writes config.json and model.safetensors in the dtype of the weights, for `read_shape` and `load`. Needs `to_config`.

    Each file is replaced as a whole. In a new folder config.json is written last.

    Args:
        extra: further fields of the config, such as vocab_size; the shape's fields take precedence.
    """
    from safetensors.torch import save_file

    assert family.to_config is not None
    folder.mkdir(parents=True, exist_ok=True)
    dtype = next(draft.parameters()).dtype
    shape = family.to_config(draft.shape)
    config = json.dumps({**(extra or {}), **shape, "dtype": precision_name(dtype)}, indent=2)
    temporary = folder / f".{_WEIGHTS}.{os.getpid()}.tmp"
    tensors = {family.published(name): tensor.contiguous() for name, tensor in draft.state_dict().items()}
    save_file(tensors, temporary, {"format": "pt"})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.chmod(0o644)  # safetensors makes files that only the owner can read, but checkpoints are shared
    os.replace(temporary, folder / _WEIGHTS)
    write_atomically(folder / "config.json", config + "\n")


def check_pair(shape: NetworkShape, *, hidden_size: int, vocab_size: int, num_layers: int, field: str = FIELD) -> None:
    """Checks that a draft fits a target of this hidden size, vocabulary and number of layers. Raises UserError."""
    last, mask = max(shape.layers_of(num_layers)), getattr(shape, "mask_token_id", 0)
    for wrong, found, allowed in (
        (shape.hidden_size != hidden_size, f"has hidden size {shape.hidden_size}", f"{hidden_size}, the target's"),
        (shape.num_target_layers not in (None, num_layers), f"was trained for a target of {shape.num_target_layers} layers",
         f"{num_layers}, the target's"),
        (last >= num_layers, f"reads layer {last} of the target", f"0 to {num_layers - 1}, the target's layers"),
        (shape.unnormed and last == num_layers - 1, "reads the target's last layer before its final norm",
         f"up to {num_layers - 1} in aux_hidden_state_layer_ids, which count the embedding's output as 0"),
        (shape.vocab_size not in (None, vocab_size), f"has tensors for a vocabulary of {shape.vocab_size}",
         f"{vocab_size}, the target's"),
        (mask >= vocab_size, f"has mask_token_id {mask}",
         f"an id below {vocab_size}, the size of the target's vocabulary"),
    ):
        if wrong:
            raise UserError(f"{field}: the draft {found}; allowed: {allowed}")


def _places(folder: Path) -> dict[str, TensorPlace]:
    """The place of each tensor by its name: in a file of weights, or in a shard that the index names. Raises UserError."""
    index = folder / f"{_WEIGHTS}.index.json"
    files = [folder / _WEIGHTS]
    if (folder / _PICKLED).is_file() and not (files[0].is_file() or index.is_file()):
        files = [folder / _PICKLED]
    if not files[0].is_file():
        if not index.is_file():
            refuse(folder, f"has no {_WEIGHTS}", f"that file, or shards with {index.name}")
        try:
            assigned = weight_map(index)
        except DamagedError as error:
            refuse(folder, f"has an {index.name} that cannot be read ({error!s:.120})", "JSON with a weight_map")
        # Another file may hold a tensor of the same name, such as one of an earlier save.
        held = {file: set(_open(folder, file).keys()) for file in set(assigned.values())}
        return {name: TensorPlace(file, name) for name, file in assigned.items() if name in held[file]}
    return {name: TensorPlace(file, name) for file in files for name in list(_open(folder, file).keys())}


def _open(folder: Path, file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if file.name == _PICKLED:
        try:
            return _Pickled(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
        except Exception as error:  # torch raises a dozen types for a file that is not whole or holds more than tensors
            refuse(folder, f"has a file {file.name} that is not whole, or holds more than tensors ({type(error).__name__})",
                   "weights as they were published")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = "is not there" if not file.is_file() else f"is not whole ({error!s:.80})"
        refuse(folder, f"has a file {file.name} that {reason}", "safetensors files as they were published")


class _Pickled:
    """Tensors of PyTorch's own format, with the interface of an open safetensors file."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors = tensors
        self.keys, self.get_tensor = tensors.keys, tensors.__getitem__

    def get_slice(self, name: str) -> _Header:
        return _Header(self._tensors[name])


class _Header(NamedTuple):
    tensor: torch.Tensor

    def get_shape(self) -> torch.Size:
        return self.tensor.shape

    def get_dtype(self) -> str:
        """The name that safetensors has for the type."""
        return _NAMES.get(self.tensor.dtype, precision_name(self.tensor.dtype))


_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32"}


def _check_tensors(folder: Path, family: Family, places: dict[str, TensorPlace],
                   expected: dict[str, tuple[int, ...]]) -> None:
    """Checks that a checkpoint has exactly the tensors that its config requires. Raises UserError."""
    network, more, fewer = family.config.network, sorted(places.keys() - expected), sorted(expected.keys() - places)
    if any(part in name for name in more for part in _DFLASH2):
        refuse(folder, "is a DFlash 2 checkpoint (it has a candidate selector or convolutions)", family.config.allowed)
    if more:
        refuse(folder, f"has tensors that {network} lacks: {_some(more)}", f"the {len(expected)} tensors of its config")
    if fewer:
        refuse(folder, f"lacks {_some(fewer)}", f"all {len(expected)} tensors of its config")
    for name, shape in expected.items():
        entry = _open(folder, places[name].file).get_slice(places[name].name)
        if tuple(entry.get_shape()) != shape:
            refuse(folder, f"has {name} of shape {tuple(entry.get_shape())}", f"{shape}, which its config.json gives")
        allowed = _INTEGERS if name == "d2t" else _FLOATS
        if entry.get_dtype() not in allowed:
            refuse(folder, f"has {name} in {entry.get_dtype()}", ", ".join(allowed))


def _some(names: Iterable[str]) -> str:
    """The first three names, for an error message."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
