"""Which earlier tokens the layers of a model attend to.

Rows of a cache hold the keys and values of all tokens. A layer with a window or with chunks therefore differs from one with
full attention in its mask alone, and a rollback is the same for all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_PROBED = {"sliding_window": 2, "attention_chunk_size": 3}
"""Lengths of a window and of a chunk in `agrees`, which a few tokens exceed."""
_PROBE_TOKENS = 7
_WINDOWED = "create_sliding_window_causal_mask"
"""A function of `transformers`. A model without it in its module has no windows, whatever its configuration says."""


class Reach(NamedTuple):
    """The earlier tokens that a layer attends to. The default is all of them."""

    window: int | None = None
    """Number of latest tokens, the query's own included."""
    chunk: int | None = None
    """The text is cut into pieces of so many tokens. A token attends to its own piece."""

    def limit(self, mask: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The mask, bool (..., queries, keys), without the keys out of reach.

        Args:
            queries, keys: int64 (..., queries) and (..., keys), positions.
        """
        if self.window is not None:
            mask = mask & (keys[..., None, :] > queries[..., None] - self.window)
        if self.chunk is not None:
            mask = mask & (keys[..., None, :] // self.chunk == queries[..., None] // self.chunk)
        return mask


FULL = Reach()
_KINDS = ("full_attention", "attention", "sliding_attention", "chunked_attention")
"""The layer types of `transformers` that a mask describes."""


class Masks(NamedTuple):
    """The reach of every type of layer in a model, by the name that `transformers` has for the type."""

    reaches: dict[str, Reach]

    @property
    def plain(self) -> bool:
        """Whether every layer has full attention."""
        return all(reach == FULL for reach in self.reaches.values())

    def of(self, causal: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor,
           additive: torch.dtype | None) -> torch.Tensor | dict[str, torch.Tensor]:
        """The masks (rows, 1, queries, keys) of a forward: one for all layers, or one for each type of layer.

        Args:
            causal: bool (rows, queries, keys), True where a query may look if nothing limits its reach.
            queries, keys: int64 (rows, queries) and (rows or nothing, keys), positions.
            additive: type of masks that are added to the scores; None for bool masks.
        """
        made: dict[Reach, torch.Tensor] = {}
        for reach in self.reaches.values():
            if reach not in made:
                mask = reach.limit(causal, queries, keys)[:, None]
                made[reach] = mask if additive is None else (
                    torch.zeros_like(mask, dtype=additive).masked_fill_(~mask, -torch.inf))
        if len(made) == 1:
            return next(iter(made.values()))
        return {name: made[reach] for name, reach in self.reaches.items()}


def types_of(config: Any) -> set[str]:
    """The types of layers of a configuration of `transformers`; empty if it does not name them."""
    return set(getattr(config, "layer_types", None) or ())


def masks_of(config: Any, decoder: torch.nn.Module | None = None) -> Masks:
    """The masks of a model with this configuration. Types of layers that no mask describes are left out.

    Args:
        decoder: the model, which says whether it has windows where the configuration names no types of layers.
    """
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    reaches = {"sliding_attention": Reach(window=window), "chunked_attention": Reach(chunk=chunk)}
    types = sorted(types_of(config) & set(_KINDS))
    if types:
        return Masks({name: reaches.get(name, FULL) for name in types})
    windowed = decoder is None or hasattr(sys.modules.get(type(decoder).__module__), _WINDOWED)
    return Masks({"attention": Reach(window=window if windowed else None)})


def unmasked_types(config: Any) -> set[str]:
    """The types of layers that no mask describes."""
    return types_of(config) - set(_KINDS)


@torch.inference_mode()
def agrees(decoder: Any, config: Any, device: torch.device) -> bool:
    """Whether a model has the masks of `masks_of`. The model runs on a few tokens with short windows and chunks.

    The decoder uses an implementation of attention that takes bool masks.
    """
    with _shortened(config):
        tokens = torch.arange(_PROBE_TOKENS, device=device)[None] % config.vocab_size
        positions = torch.arange(_PROBE_TOKENS, device=device)
        causal = (positions <= positions[:, None])[None]
        mask = masks_of(config, decoder).of(causal, positions[None], positions, None)
        theirs = decoder(input_ids=tokens, use_cache=False).last_hidden_state
        try:
            ours = decoder(input_ids=tokens, attention_mask=mask, position_ids=positions[None], use_cache=False)
        except (AttributeError, TypeError, KeyError, ValueError):  # the model takes one mask for layers of several types
            return False
    return torch.allclose(ours.last_hidden_state.float(), theirs.float(), atol=1e-2, rtol=1e-2)


@contextmanager
def _shortened(config: Any) -> Iterator[None]:
    """A context in which the configuration has short windows and chunks, where it has any."""
    before = {name: getattr(config, name) for name in _PROBED if getattr(config, name, None) is not None}
    for name in before:
        setattr(config, name, _PROBED[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
