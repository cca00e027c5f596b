"""The layers of the DFlash draft network: attention with rotary positions, the feed-forward part, and the norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import silu

from dflash_mcmc.draft.network.dflash.shape import DFlashShape


class DraftLayer(torch.nn.Module):
    """A decoder layer. It computes outputs only for the tokens of blocks, not for the context."""

    def __init__(self, shape: DFlashShape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Callable) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(torch.nn.Module):
    """Attention of a block's tokens to the context and to the block. One set of projections serves context and block."""

    def __init__(self, shape: DFlashShape):
        super().__init__()
        queries, keys = shape.num_heads * shape.head_dim, shape.num_key_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj = torch.nn.Linear(shape.hidden_size, queries, bias=shape.bias)
        self.k_proj = torch.nn.Linear(shape.hidden_size, keys, bias=shape.bias)
        self.v_proj = torch.nn.Linear(shape.hidden_size, keys, bias=shape.bias)
        self.o_proj = torch.nn.Linear(queries, shape.hidden_size, bias=shape.bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def keys_values(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, normed and rotated, and values, each (rows, key heads, m, head_dim). The input norm skips context states."""
        values = self._split(self.v_proj(hidden))
        # Under autocast a norm's product is in float32. Keys get the dtype of the values: both go into one cache.
        return _rotate(self.k_norm(self._split(self.k_proj(hidden))), rotation).to(values.dtype), values

    def forward(self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Callable) -> torch.Tensor:
        keys, values = self.keys_values(hidden, rotation)
        queries = _rotate(self.q_norm(self._split(self.q_proj(hidden))), rotation).to(values.dtype)
        return self.o_proj(attend(queries, keys, values).transpose(1, 2).flatten(2))

    def _split(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(torch.nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, shape: DFlashShape):
        super().__init__()
        self.gate_proj = torch.nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = torch.nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class RMSNorm(torch.nn.Module):
    """Norm by the root mean square of the last axis, in float32. The result is rounded before the weight is applied."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        exact = hidden.float()
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(hidden.dtype)


class Rotation:
    """Cosines and sines of positions, from float32 frequencies.

    It is not a module, because a cast of the network to bfloat16 would also cast the buffers of a module. At position 1000
    the angles would then be wrong by up to two radians.
    """

    def __init__(self, shape: DFlashShape):
        self.frequencies, self.scale = _frequencies(shape)

    @torch.no_grad()
    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each (rows, 1, m, head_dim), of positions (rows, m). They are rounded to `dtype` at the end."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None, :, None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def _frequencies(shape: DFlashShape) -> tuple[torch.Tensor, float]:
    """Angles per position in radians, float32 (head_dim / 2,), and the factor of cosines and sines, as in Qwen3."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(hidden_size=shape.hidden_size, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
                         max_position_embeddings=shape.max_positions, rope_parameters=dict(shape.rope))
    with torch.device("cpu"):  # on the CPU even if the network is built on the meta device
        embedding = Qwen3RotaryEmbedding(config)
    return embedding.inv_freq.float(), embedding.attention_scaling


def _rotate(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates (rows, heads, m, head_dim) by halves: axis j and j + head_dim / 2 are one plane."""
    cosines, sines = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
