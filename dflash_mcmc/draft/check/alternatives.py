"""The known mistakes in the use of a draft, each as the setting in which it would be put right."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.draft.check.forced import DraftSetting, with_shape
from dflash_mcmc.draft.network.config import default_target_layers
from dflash_mcmc.model.files import precision

if TYPE_CHECKING:

    from dflash_mcmc.draft.network.dflash import DFlash
    from dflash_mcmc.engine.batching.language_model import LanguageModel

_THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)
"""Bases of the rotation that published models have."""
_BLOCKS = (4, 7, 8, 10, 16)
"""Block sizes of published drafts."""


class Alternative(NamedTuple):
    """A changed setting."""

    kind: str
    """layout, layers, feature, norm, mask, rope, block, dtype or weights."""
    name: str
    """What is changed, for tables."""
    cause: str
    """The mistake, if the draft accepts more in this setting: a clause for the sentence of the verdict."""
    setting: DraftSetting
    step: int = 0
    """For a layout, the places from a slot to the token that it predicts."""


class CheckedPair(NamedTuple):
    """What the alternatives are made of."""

    base: DraftSetting
    target: LanguageModel
    float32: DFlash | None
    """The checkpoint loaded in float32, if the draft runs in another precision."""
    other: LanguageModel | None
    """Another model that the draft may have been trained for."""


def alternatives(subject: CheckedPair, kinds: Sequence[str] | None = None) -> list[Alternative]:
    """All alternatives that apply, or those of some kinds. Settings that are the draft's own are left out."""
    parts = {"layout": _layout, "layers": _layers, "feature": _features, "norm": _norms, "mask": _masks, "rope": _rotations,
             "block": _blocks, "dtype": _precision, "weights": _weights}
    return [alternative for kind in (parts if kinds is None else kinds) for alternative in parts[kind](subject)]


def _layout(subject: CheckedPair) -> Iterator[Alternative]:
    base = subject.base
    for step, side in ((1, "after"), (-1, "before")):
        yield Alternative("layout", f"rows {'one later' if step > 0 else 'one earlier'}",
                          f"the block is off by one slot: each row predicts the token {side} its own slot",
                          dataclasses.replace(base, offset=base.offset + step), step)


def _layers(subject: CheckedPair) -> Iterator[Alternative]:
    base, last = subject.base, len(subject.target.layers) - 1
    layers, seen = base.layers, {base.layers}
    lists = [("every layer + 1", tuple(layer + 1 for layer in layers), "the layers of the features are one too low"),
             ("every layer - 1", tuple(layer - 1 for layer in layers), "the layers of the features are one too high"),
             ("layers reversed", layers[::-1], "the features are in the reversed order"),
             ("layers rotated left", layers[1:] + layers[:1], "the list of layers is rotated by one"),
             ("layers rotated right", layers[-1:] + layers[:-1], "the list of layers is rotated by one"),
             ("layers sorted", tuple(sorted(layers)), "the layers of the features are not in rising order")]
    for one in range(len(layers)):
        for two in range(one + 1, len(layers)):
            swapped = list(layers)
            swapped[one], swapped[two] = layers[two], layers[one]
            lists.append((f"features {one + 1} and {two + 1} exchanged", tuple(swapped),
                          f"features {one + 1} and {two + 1} are exchanged"))
    for number, layer in enumerate(layers):
        for step in (-1, 1):
            moved = (*layers[:number], layer + step, *layers[number + 1 :])
            lists.append((f"feature {number + 1} from layer {layer + step}", moved,
                          f"feature {number + 1} is read from layer {layer} instead of {layer + step}"))
    lists.append(("the published rule", default_target_layers(last + 1, len(layers)),
                  "the features are not those of the published rule for this number of layers"))
    for name, changed, cause in lists:
        if changed not in seen and all(0 <= layer <= last for layer in changed):
            seen.add(changed)
            yield Alternative("layers", f"{name}: {list(changed)}", f"{cause} ({list(layers)}, better {list(changed)})",
                              dataclasses.replace(base, layers=changed))


def _features(subject: CheckedPair) -> Iterator[Alternative]:
    for number, layer in enumerate(subject.base.layers):
        yield Alternative("feature", f"without feature {number + 1} (layer {layer})",
                          f"feature {number + 1} (layer {layer}) does harm, so it is not the feature that was trained with",
                          dataclasses.replace(subject.base, dropped=number))


def _norms(subject: CheckedPair) -> Iterator[Alternative]:
    base, last = subject.base, len(subject.target.layers) - 1
    yield Alternative("norm", "features after the final norm",
                      "the draft was trained with features after the target's final norm, and gets them before it",
                      dataclasses.replace(base, norm="all"))
    if last in base.layers:
        yield Alternative("norm", "the last layer before the final norm",
                          "the draft was trained with the last layer's output before the final norm, and gets it after it",
                          dataclasses.replace(base, norm="none"))


def _masks(subject: CheckedPair) -> Iterator[Alternative]:
    shape, target, tokenizer = subject.base.network.shape, subject.target, subject.target.tokenizer
    unused = target.forbidden.nonzero().flatten().tolist()
    candidates = {"the first unused id": unused[0] if unused else None, "the last unused id": unused[-1] if unused else None,
                  "the last id": target.vocab_size - 1, "id 0": 0,
                  **{name.replace("_", " ") + " of the tokenizer": getattr(tokenizer, f"{name}_id", None)
                     for name in ("mask_token", "pad_token", "eos_token", "bos_token", "unk_token")}}
    seen = {shape.mask_token_id}
    for name, token in candidates.items():
        if isinstance(token, int) and token not in seen and token < target.vocab_size:
            seen.add(token)
            yield Alternative("mask", f"mask {token}, {name}", f"mask_token_id is {shape.mask_token_id}, and {token} ({name}) "
                              "fits", _with_shape(subject, mask_token_id=token))


def _rotations(subject: CheckedPair) -> Iterator[Alternative]:
    rope = subject.base.network.shape.rope
    own = getattr(subject.target.config, "rope_parameters", None) or {}
    theirs = own.get("rope_theta") if isinstance(own, dict) else None
    for theta in dict.fromkeys((*([theirs] if theirs else []), *_THETAS)):
        if theta != rope["rope_theta"]:
            whose = " (the target's)" if theta == theirs else ""
            yield Alternative("rope", f"rope_theta {theta:g}{whose}",
                              f"rope_theta is {rope['rope_theta']:g}, and {theta:g} fits{whose}",
                              _with_shape(subject, rope={**rope, "rope_theta": theta}))
    if rope["rope_type"] != "default":
        yield Alternative("rope", "plain rotation", f"rope_type is {rope['rope_type']}, and the plain rotation fits",
                          _with_shape(subject, rope={"rope_type": "default", "rope_theta": rope["rope_theta"]}))


def _blocks(subject: CheckedPair) -> Iterator[Alternative]:
    given = subject.base.network.shape.block_size
    for size in sorted({*_BLOCKS, given // 2, given * 2} - {given}):
        if size > 2:
            word = "larger" if given > size else "smaller"
            yield Alternative("block", f"block size {size}", f"the block size {given} is {word} than the trained one; {size} "
                              "fits better", _with_shape(subject, block_size=size))


def _precision(subject: CheckedPair) -> Iterator[Alternative]:
    if subject.float32 is not None:
        dtype = precision.name_of(subject.base.network.fc.weight.dtype)
        yield Alternative("dtype", "the draft in float32", f"the draft runs in {dtype}, which is too coarse or overflows",
                          dataclasses.replace(subject.base, network=subject.float32))


def _weights(subject: CheckedPair) -> Iterator[Alternative]:
    base, other = subject.base, subject.other
    if other is None:
        return
    for what, setting in (("embedding", dataclasses.replace(base, embedding=other)),
                          ("head", dataclasses.replace(base, head=other)),
                          ("embedding and head", dataclasses.replace(base, embedding=other, head=other))):
        yield Alternative("weights", f"{what} of the other model", f"the draft was trained with the {what} of the other "
                          "model, not with this target's", setting)


def _with_shape(subject: CheckedPair, **changes: object) -> DraftSetting:
    return dataclasses.replace(subject.base, network=with_shape(subject.base.network, **changes))
