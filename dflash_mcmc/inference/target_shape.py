"""The properties of a target that config.json gives before the weights are loaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dflash_mcmc.inference.cache import CacheShape
from dflash_mcmc.inference.prompt_encoder import max_positions
from dflash_mcmc.inference.recurrent_shape import recurrent_shape


class TargetShape(NamedTuple):
    """The attributes of `LanguageModel` that the checks before a start need, under the same names."""

    config: Any
    """The configuration of `transformers`."""
    device: torch.device
    dtype: torch.dtype
    num_parameters: int | None
    """Parameters in the files of the checkpoint; None if it has no safetensors files here."""

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def max_positions(self) -> int | None:
        return max_positions(self.config)

    @property
    def cache_shape(self) -> CacheShape:
        """Shape of the keys and values of a token, for layers of the usual multi-head or grouped attention."""
        heads = self.config.num_attention_heads
        dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        recurrent = recurrent_shape(self.config, self.dtype)
        attending = self.num_layers - (len(recurrent.layers) if recurrent else 0)
        key_heads = getattr(self.config, "num_key_value_heads", None) or heads
        return CacheShape(attending, key_heads, dim, dim, self.dtype, recurrent)

    def weight_bytes(self) -> int | None:
        """Bytes of the weights and of the float32 copy of the head that `LanguageModel` makes; None if not known."""
        if self.num_parameters is None:
            return None
        copy = 0 if self.dtype == torch.float32 else 4 * self.vocab_size * self.config.hidden_size
        return self.num_parameters * self.dtype.itemsize + copy


class DraftSize(NamedTuple):
    """The sizes of a draft that an engine's memory depends on. A `Drafter` has attributes of the same names."""

    num_drafted: int
    companion: CacheShape | None = None
