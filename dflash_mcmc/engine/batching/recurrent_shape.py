"""The sizes of recurrent layers, which a configuration of `transformers` gives before the weights are loaded.

A hybrid model mixes attention with layers of the gated delta rule (arXiv 2412.06464). Such a layer has no keys and values: its
state after a token is a short convolution's last inputs, and a matrix for each head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dflash_mcmc.engine.batching.interface import Options

LINEAR = "linear_attention"
"""The name of a recurrent layer in `layer_types`."""
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Values of `model_type` whose recurrent layers `delta_net.py` computes."""
PIECE = 64
"""Most tokens of a piece of a replay, which limits its memory."""
_WORK_COPIES = 6
"""Number of float32 arrays, as large as the matrices or the channels of all tokens, that a layer holds at the same time."""


class RecurrentShape(NamedTuple):
    """Shape of the recurrent layers of a model, and of the state of one sequence in each of them."""

    layers: tuple[int, ...]
    """Numbers of the recurrent layers, from 0."""
    width: int
    """Hidden size, the size of a layer's input."""
    window: int
    """Earlier inputs that the convolution reads."""
    channels: int
    """Channels of the convolution."""
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    """Precision of inputs and windows. The matrices are in float32."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the state after one token, in all layers."""
        matrix = self.num_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return len(self.layers) * (self.window * self.channels * self.dtype.itemsize + matrix)

    def work_bytes(self, queries: int) -> int:
        """Bytes that a layer takes to compute the states after so many tokens of one sequence."""
        matrix = self.num_heads * self.key_dim * self.value_dim
        return _WORK_COPIES * (matrix + queries * self.channels) * torch.float32.itemsize

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs of one token, in all layers."""
        return len(self.layers) * self.width * self.dtype.itemsize


def recurrent_shape(config: Any, dtype: torch.dtype) -> RecurrentShape | None:
    """The shape of a model's recurrent layers; None if it has none, or layers of another kind than `FAMILIES`."""
    kinds = getattr(config, "layer_types", None) or ()
    if LINEAR not in kinds or config.model_type not in FAMILIES:
        return None
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return RecurrentShape(
        tuple(number for number, kind in enumerate(kinds) if kind == LINEAR), config.hidden_size,
        config.linear_conv_kernel_dim - 1, 2 * keys + values, config.linear_num_value_heads, config.linear_key_head_dim,
        config.linear_value_head_dim, dtype)


def num_recent(options: Options, num_drafted: int) -> int:
    """Number of states that a row keeps beside its snapshots: one for each position that a row can reach between two checks.

    Args:
        num_drafted: tokens of a draft's block.
    """
    return (options.steps_between_checks or 1) * (1 + num_drafted) + 1


def num_snapshots(num_pages: int, page_size: int, every: int) -> int:
    """Number of snapshots of a cache of pages: those of rows that share no page."""
    return -(-num_pages * page_size // every)
