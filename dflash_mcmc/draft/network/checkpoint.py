"""Checkpoints of DFlash drafts: a folder with config.json and safetensors, in all published spellings.

Other networks are refused by name. A related network with the same backbone would run, but with wrong results that show only
as a low number of accepted tokens.

Source: DFlash (arXiv 2602.06036).
"""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from dflash_mcmc.draft.network.dflash import DFlash, DFlashShape, NetworkShape, Rotation, target_ids
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.model.files import PRECISIONS, DamagedError, precision_name, weight_map, wrong_rotation
from dflash_mcmc.store.files import write_atomically

FIELD = "draft.path"
_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_FULL_LAYERS = 28
"""Qwen3's number of layers before the first one with a window. It is the default if a config does not say which layers."""
_LARGEST, _MOST_LAYERS, _MOST_HEADS = 2**24, 4096, 2**16
"""The largest sizes, so that no tensor has more numbers than PyTorch can count."""
DEFAULT_THETA = 10_000.0
"""rope_theta of transformers for Qwen3 and Llama."""
_OUTSIDE = ("speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config", "model_type",
            "tie_word_embeddings")
"""Fields of a config of speculators that are not those of the network."""
_ROPES = ("default", "linear", "yarn", "llama3")
"""Rotations whose frequencies do not depend on the length of the sequence."""
_WEIGHTS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_INTEGERS = ("I64", "I32")
_FLOATS = ("F32", "F16", "BF16")
_DFLASH2 = ("candidate_selector.", "attention_conv.", "mlp_conv.")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""Tensors of the target that a checkpoint may repeat. They are not loaded; `check_copies` compares them."""
_UNREAD = ("t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of the speculators library that the network does not need. d2t is one of them with a whole vocabulary."""


def refuse(folder: Path, found: str, allowed: str) -> NoReturn:
    """Raises a UserError that says what the draft in a folder has and what is allowed."""
    raise UserError(f"{FIELD}: {folder} {found}; allowed: {allowed}")


class DraftConfig:
    """A config.json. A field is looked up in its dflash_config first, as in the published code, then at the top level.

    Attributes:
        network: name of the network, for errors.
        shape_type: class of the shape.
        section: the mapping with the fields that are the network's own.
        architectures: names of the classes in the published configs.
        allowed: these classes in words, for errors.
        speculators: its `speculators_model_type` in the layout of that library, in which a vocabulary may be reduced; None if
            both are refused.
        speculators_layers, layer_models: the name of the target's layers there, and the allowed kinds of decoder layers.
        least_layer: the first layer of the target that it may read; -1 is the embedding's output.
        looks_ahead: whether a layer with a window may be not causal.
        unread: tensors that the network does not need.
        foreign: fields that change the computation, each with its values for this network.
    """

    network: ClassVar[str] = "DFlash"
    shape_type: ClassVar[type[Any]] = DFlashShape
    section: ClassVar[str] = "dflash_config"
    architectures: ClassVar[tuple[str, ...]] = ("DFlashDraftModel",)
    speculators: ClassVar[str | None] = "dflash"
    speculators_layers: ClassVar[str] = "aux_hidden_state_layer_ids"
    layer_models: ClassVar[tuple[str, ...]] = ("qwen3",)
    least_layer: ClassVar[int] = 0
    looks_ahead: ClassVar[bool] = False
    unread: ClassVar[tuple[str, ...]] = ()
    allowed: ClassVar[str] = "DFlashDraftModel (DFlash, the first version)"
    foreign: ClassVar[dict[str, tuple]] = {
        "speculators_model_type": (None,), "quantization_config": (None,), "projector_type": (None, "dflash"),
        "sample_from_anchor": (None, False), "shift_label": (None, False), "use_swa": (None, False),
        "use_aux_hidden_state": (None, True), "causal": (None, False), "is_causal": (None, False),
        "hidden_act": (None, "silu"),
    }

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.top = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(FIELD, str(folder), f"a folder whose config.json is JSON ({error})") from error
        self.is_speculators = isinstance(self.top, dict) and self.speculators is not None and (
            self.top.get("speculators_model_type") == self.speculators)
        if self.is_speculators:
            self.top = self._of_speculators(self.top)
        self.own: Any = self.top.get(self.section) or {} if isinstance(self.top, dict) else None
        if not isinstance(self.own, dict):
            self.refuse(f"has a config.json that is no mapping, or whose {self.section} is none", "the published layout")

    def shape(self) -> NetworkShape:
        """The shape that the config describes. Raises UserError."""
        self.check_architecture(self.get("architectures"))
        self.refuse_others(self.foreign)
        for name, same in (("target_hidden_size", "hidden_size"), ("draft_vocab_size", "vocab_size")):
            if self.get(name) not in (None, self.get(same)) and not (name == "draft_vocab_size" and self.speculators):
                self.refuse(f"has {name} {self.get(name)}", f"{same}, which is {self.get(same)}")
        shape = self.shape_type(**self.fields())
        self.check(shape)
        return shape

    def fields(self) -> dict[str, Any]:
        """The fields of the shape. Raises UserError."""
        softcap, common = self.number("final_logit_softcapping", 0.0), self.common()
        return dict(
            common, **self.vocabulary(), block_size=self.integer("block_size", _DEFAULT_BLOCK_SIZE, least=2),
            mask_token_id=self.integer("mask_token_id", least=0), sliding=self._sliding(common["num_layers"]),
            embedding_scale=self.number("input_embedding_scale", 1.0),
            logit_scale=self.number("output_multiplier", 1.0), logit_softcap=softcap if softcap > 0 else None,
        )

    def common(self) -> dict[str, Any]:
        """The fields of a `NetworkShape`, without the vocabulary. Raises UserError."""
        num_layers = self.integer("num_hidden_layers", most=_MOST_LAYERS)
        num_heads = self.integer("num_attention_heads", most=_MOST_HEADS)
        hidden_size, num_target_layers = self.integer("hidden_size"), self.get("num_target_layers")
        dtype = self.get("dtype") or self.get("torch_dtype") or "float32"
        if dtype not in PRECISIONS:
            self.refuse(f"has dtype {dtype!r}", "float32, float16 or bfloat16")
        if wrong := wrong_rotation({**self.top, **{name: value for name, value in self.own.items() if value is not None}}):
            self.refuse(f"has {wrong[0]} {wrong[1]}", wrong[2])
        parameters = self.get("rope_parameters") or self.get("rope_scaling") or {}
        rope = dict(parameters)
        legacy = rope.pop("type", None)
        rope = {"rope_type": legacy or "default", "rope_theta": self.get("rope_theta"), **rope}
        if rope["rope_type"] not in _ROPES:
            self.refuse(f"has a rotation of rope_type {rope['rope_type']!r}", ", ".join(_ROPES))
        if rope.get("partial_rotary_factor", self.get("partial_rotary_factor")) not in (None, 1):
            self.refuse("has partial_rotary_factor, which rotates a part of each head", "1")
        if not isinstance(rope["rope_theta"], (int, float)):  # refuses a rope_theta per kind of layer too
            self.refuse("has a config.json without rope_theta", "the published layout, which has it for all layers at once")
        return dict(
            hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads,
            num_key_heads=self.integer("num_key_value_heads", num_heads, most=_MOST_HEADS),
            head_dim=self.integer("head_dim", hidden_size // num_heads, most=_MOST_HEADS),
            intermediate_size=self.integer("intermediate_size"),
            target_layers=self._target_layers(num_layers), unnormed=bool(self.get("unnormed", False)),
            num_target_layers=None if num_target_layers is None else self.integer("num_target_layers"),
            norm_eps=self.number("rms_norm_eps", 1e-6), rope=rope,
            max_positions=self.integer("max_position_embeddings"), bias=bool(self.get("attention_bias", False)),
            dtype=getattr(torch, dtype),
        )

    def vocabulary(self) -> dict[str, int]:
        """`vocab_size` and `draft_vocab_size` of a network with a reduced vocabulary; empty for another. Raises UserError."""
        if self.get("draft_vocab_size") in (None, self.get("vocab_size")):
            return {}
        size = self.integer("vocab_size")
        return {"vocab_size": size, "draft_vocab_size": self.integer("draft_vocab_size", most=size)}

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value; null counts as absent."""
        values = (part.get(name) for part in (self.own, self.top))
        return next((value for value in values if value is not None), default)

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = _LARGEST) -> int:
        value = self.get(name, default)
        if value is None:
            self.refuse(f"has a config.json without {name}", "the published layout, which has it")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(f"has {name} {value!r:.60}", f"an integer >= {least} and <= {most}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
            self.refuse(f"has {name} {value!r:.60}", "a number")
        return float(value)

    def refuse(self, found: str, allowed: str) -> NoReturn:
        refuse(self.folder, found, allowed)

    def _of_speculators(self, top: dict[str, Any]) -> dict[str, Any]:
        """The published spelling of a config of the speculators library, which leaves defaults of transformers out.

        Its ids of layers count the embedding's output as 0.
        """
        from transformers import AutoConfig

        layer, layers = top.get("transformer_layer_config"), top.get(self.speculators_layers)
        if not isinstance(layer, dict) or layer.get("model_type", "qwen3") not in self.layer_models:
            self.refuse("has no transformer_layer_config of a network that is known here",
                        f"the layout of speculators, with model_type {' or '.join(self.layer_models)}")
        if "sliding_attention" in (layer.get("layer_types") or ()):
            self.refuse("has sliding layers in the layout of speculators, where training and serving differ in what a token "
                        "of a block sees", "full_attention")
        if isinstance(layers, list) and all(type(each) is int for each in layers):
            layers = [each - 1 for each in layers]
        defaults = AutoConfig.for_model(layer.get("model_type", "qwen3")).to_dict()
        derived = dict.fromkeys(("layer_types", "rope_parameters", "dtype", "architectures"))
        outer = {name: value for name, value in top.items() if value is not None and name not in _OUTSIDE}
        return {**defaults, **derived, "rope_theta": DEFAULT_THETA, **layer, **outer, "architectures": None,
                "target_layer_ids": layers, "unnormed": True}

    def refuse_others(self, fields: dict[str, tuple]) -> None:
        """Refuses other values of fields than these, which are those of this network. Raises UserError."""
        for name, allowed in fields.items():
            for value in (self.own.get(name), self.top.get(name)):
                if value not in allowed:
                    words = " or ".join("absent" if word is None else json.dumps(word) for word in allowed)
                    self.refuse(f"has {name} {json.dumps(value)[:60]}, which makes it another network than {self.network}",
                                words)

    def check_architecture(self, names: Any) -> None:
        """Refuses another class than this network's. `names` is None if the config names none."""
        if names and (not isinstance(names, list) or len(names) > 1 or names[0] not in self.architectures):
            listed = names if isinstance(names, list) else [names]
            self.refuse(f"is a checkpoint of {', '.join(map(str, listed))}", self.allowed)

    def _target_layers(self, num_layers: int) -> tuple[int, ...]:
        layers = self.get("target_layer_ids")
        if layers is None:  # a config that names its layers may omit the target's number of layers
            layers = list(default_target_layers(self.integer("num_target_layers"), num_layers))
        return self.layer_list(layers)

    def layer_list(self, layers: Any) -> tuple[int, ...]:
        """Layers of the target. Raises UserError for other values."""
        valid = isinstance(layers, list) and all(type(layer) is int and layer >= self.least_layer for layer in layers)
        if not valid or not layers:
            self.refuse(f"has target_layer_ids {layers!r}", "a list of the target's layers, the first being 0")
        return tuple(layers)

    def _sliding(self, num_layers: int) -> tuple[int | None, ...]:
        kinds, use = self.get("layer_types"), self.get("use_sliding_window")
        if kinds is None:
            first = self.integer("max_window_layers", _DEFAULT_FULL_LAYERS, least=0)
            slides = bool(use) and self.get("sliding_window") is not None
            kinds = ["sliding_attention" if slides and i >= first else "full_attention" for i in range(num_layers)]
        valid = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
        if not valid or len(kinds) != num_layers:
            self.refuse(f"has layer_types {kinds!r:.100}", f"full_attention or sliding_attention for {num_layers} layers")
        if "sliding_attention" not in kinds:
            return (None,) * num_layers
        if use is False:
            self.refuse("has sliding_attention among its layer_types, and use_sliding_window false", "true or absent")
        if not self.looks_ahead and False in (self.get("is_causal"), self.get("causal")):
            self.refuse("has sliding layers in which a block's rows look ahead (is_causal or causal false)", "absent")
        window = self.integer("sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def check(self, shape: Any) -> None:
        """Refuses numbers that do not fit one another. Raises UserError."""
        if shape.num_heads % shape.num_key_heads or shape.head_dim % 2:
            self.refuse(f"has {shape.num_heads} heads, {shape.num_key_heads} key heads and head_dim {shape.head_dim}",
                        "heads that are a multiple of the key heads, and an even head_dim")
        if shape.num_target_layers is not None and max(shape.target_layers, default=0) >= shape.num_target_layers:
            self.refuse(f"has target_layer_ids up to {max(shape.target_layers)}",
                        f"0 to {shape.num_target_layers - 1}, since num_target_layers is {shape.num_target_layers}")
        try:
            Rotation(shape)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            self.refuse(f"has a rotation that cannot be computed: {json.dumps(shape.rope)} ({error!r:.80})",
                        f"what rope_type {shape.rope['rope_type']} needs")


def default_target_layers(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The target's layers that a draft with `num_layers` layers reads by default, evenly spaced from the second one on."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers))


def to_config(shape: DFlashShape) -> dict[str, Any]:
    """The published spelling of a shape, without the dtype."""
    windows = {window for window in shape.sliding if window is not None}
    if len(windows) > 1:
        raise UserError(f"{FIELD}: given layers with windows {sorted(windows)}; allowed: one window for all that have any")
    scaling = {name: value for name, value in shape.rope.items() if name != "rope_theta"}
    scales = {"input_embedding_scale": (shape.embedding_scale, 1.0), "output_multiplier": (shape.logit_scale, 1.0),
              "final_logit_softcapping": (shape.logit_softcap, None)}
    return {
        "architectures": list(DraftConfig.architectures), "model_type": "qwen3",
        "block_size": shape.block_size,
        "dflash_config": {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.target_layers),
                          **{name: value for name, (value, default) in scales.items() if value != default}},
        "num_target_layers": shape.num_target_layers,
        **({} if shape.draft_vocab_size is None else {"vocab_size": shape.vocab_size,
                                                      "draft_vocab_size": shape.draft_vocab_size}),
        "num_hidden_layers": shape.num_layers, "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_key_heads, "head_dim": shape.head_dim,
        "hidden_act": shape.activation, "rms_norm_eps": shape.norm_eps,
        "attention_bias": shape.bias, "attention_dropout": 0.0,
        "rope_theta": shape.rope["rope_theta"], "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "max_position_embeddings": shape.max_positions,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in shape.sliding],
        "sliding_window": next(iter(windows), None), "use_sliding_window": bool(windows),
        "max_window_layers": shape.num_layers, "tie_word_embeddings": True,
    }


class Family(NamedTuple):
    """A kind of draft network whose checkpoints have the layout of DFlash's."""

    config: type[DraftConfig]
    """How config.json is read."""
    network: type[Any]
    prefix: tuple[str, str] = ("", "")
    """Another prefix of the names of tensors, and what takes its place."""

    def read_shape(self, folder: Path) -> Any:
        """The shape described by a folder's config.json.

        Raises:
            ConfigError: the folder or its config.json does not exist.
            UserError: the config is not JSON, lacks a field, or describes another network.
        """
        if not (folder / "config.json").is_file():
            raise ConfigError(FIELD, str(folder), f"the folder of a {self.config.network} checkpoint, with config.json and "
                              "safetensors")
        return self.config(folder).shape()

    def named(self, name: str) -> str:
        """The network's name of a tensor that a checkpoint calls `name`."""
        old, new = self.prefix
        return new + name.removeprefix(old) if name.startswith(old) else name


DFLASH = Family(DraftConfig, DFlash)


def load(folder: Path, dtype: torch.dtype | None, device: torch.device | str, family: Family = DFLASH) -> Any:
    """The draft of a folder, in eval mode, with fixed weights.

    Args:
        dtype: dtype of the weights; None keeps the checkpoint's.
        family: the kind of network.

    Raises:
        UserError: for the reasons of `Family.read_shape`, or if there are no weights, or if weights are damaged, unexpected,
            missing, or of another shape than the config's.
    """
    draft, places = check_tensors(folder, family)
    dtype = dtype or draft.shape.dtype
    tensors = {name: _open(folder, place.file).get_tensor(place.name) for name, place in places.items()}
    draft.load_state_dict({name: tensor.to(device, dtype if tensor.is_floating_point() else torch.int64)
                           for name, tensor in tensors.items()}, assign=True)
    if draft.shape.draft_vocab_size is not None:  # its tokens are tokens of the target, each once
        ids, size = target_ids(draft), draft.shape.vocab_size
        if size is None or not bool(((ids >= 0) & (ids < size)).all()) or len(ids.unique()) < len(ids):
            refuse(folder, "has a d2t that maps no two tokens of the draft to different tokens of the target",
                   f"places + d2t that are different ids from 0 to {(size or 0) - 1}")
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
    ignored = {EMBEDDING, HEAD, *family.config.unread, *(_UNREAD if family.config.speculators else ())}
    places = {own: place for name, place in _places(folder).items()
              if (own := family.named(name)) in expected or not ignored & {name, own}}
    # Checks that a checkpoint has exactly the tensors that its config requires
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
    return draft, places


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


def save(draft: DFlash, folder: Path, extra: dict[str, Any] | None = None) -> None:
    """Writes config.json and model.safetensors in the dtype of the weights, for `load`.

    Each file is replaced as a whole. In a new folder config.json is written last.

    Args:
        extra: further fields of the config, such as vocab_size; the shape's fields take precedence.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    dtype = next(draft.parameters()).dtype
    config = json.dumps({**(extra or {}), **to_config(draft.shape), "dtype": precision_name(dtype)}, indent=2)
    temporary = folder / f".{_WEIGHTS}.{os.getpid()}.tmp"
    tensors = {name: tensor.contiguous() for name, tensor in draft.state_dict().items()}
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


class _Pickled(dict[str, torch.Tensor]):
    """Tensors of PyTorch's own format, with the interface of an open safetensors file."""

    get_tensor = dict.__getitem__

    def get_slice(self, name: str) -> SimpleNamespace:
        tensor = self[name]
        named = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32"}
        return SimpleNamespace(get_shape=lambda: tensor.shape,
                               get_dtype=lambda: named.get(tensor.dtype, precision_name(tensor.dtype)))


def _some(names: Iterable[str]) -> str:
    """The first three names, for an error message."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
