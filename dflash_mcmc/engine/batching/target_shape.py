"""The properties of a target that config.json gives before the weights are loaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dflash_mcmc.engine.batching import attention, masks
from dflash_mcmc.engine.batching.cache import CacheShape
from dflash_mcmc.engine.batching.float32_head import keeps_copy
from dflash_mcmc.engine.batching.prompt_encoder import max_positions
from dflash_mcmc.engine.batching.recurrent_shape import recurrent_shape


class TargetShape(NamedTuple):
    """The attributes of `LanguageModel` that the checks before a start need, under the same names."""

    config: Any
    """The configuration of `transformers`."""
    device: torch.device
    dtype: torch.dtype
    num_parameters: int | None
    """Parameters in the files of the checkpoint; None if it has no safetensors files here."""
    head_copy: bool | None = None
    """See `Float32Head`."""

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
    def attention_needs(self) -> attention.Needs:
        return attention.needs_of(self.config, masks.masks_of(self.config).plain)

    @property
    def cache_shape(self) -> CacheShape:
        """Shape of the keys and values of a token. Latent attention (DeepSeek) has one latent and one rotated part."""
        heads, latent = self.config.num_attention_heads, getattr(self.config, "kv_lora_rank", None)
        if latent is not None:
            return CacheShape(self.num_layers, 1, latent, self.config.qk_rope_head_dim, self.dtype)
        dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        recurrent = recurrent_shape(self.config, self.dtype)
        attending = self.num_layers - (len(recurrent.layers) if recurrent else 0)
        key_heads = getattr(self.config, "num_key_value_heads", None) or heads
        return CacheShape(attending, key_heads, dim, dim, self.dtype, recurrent)

    def weight_bytes(self) -> int | None:
        """Bytes of the weights and of the float32 copy of the head; None if not known."""
        if self.num_parameters is None:
            return None
        copied = keeps_copy(self.head_copy, self.device) and self.dtype != torch.float32
        return self.num_parameters * self.dtype.itemsize + (4 * self.vocab_size * self.config.hidden_size if copied else 0)


class DraftSize(NamedTuple):
    """The sizes of a draft that an engine's memory depends on. A `Drafter` has attributes of the same names."""

    num_drafted: int
    companion: CacheShape | None = None
    token_bytes: int = 0
    """Further bytes of each position of a row: keys and values that a draft keeps outside the cache."""
    num_weights: int | None = 0
    """Weights in its files; None if they are not known, or if the draft learns while it is used."""
