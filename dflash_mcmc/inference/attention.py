"""Attention over a slot cache, registered as implementations of `transformers`.

`grouped` puts the queries of all heads that share a key head into one matrix. Keys and values are read once and never
repeated for each head. On a CPU it is faster than PyTorch's fused kernel at the short lengths of decoding.
`ragged` is the kernel of the flash-attn package for caches whose rows are filled to different lengths (Dao 2023,
arXiv 2307.08691). The name avoids "flash", because `transformers` would search for a kernel under such a name.
"""

from __future__ import annotations

import importlib.util

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from dflash_mcmc.errors import ConfigError

CHOICES = ("auto", "grouped", "sdpa", "eager", "flash_attention_2")

ADDITIVE = ("grouped", "eager")
"""Implementations that add the mask to the scores. The additive mask is made once per forward, not once per layer."""


def implementation(choice: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name of a choice in `transformers`' registry. Raises ConfigError if the choice cannot run."""
    if choice == "auto":
        return "grouped" if device.type == "cpu" else "sdpa"
    if choice != "flash_attention_2":
        return choice
    others = ", ".join(name for name in CHOICES if name != choice)
    if importlib.util.find_spec("flash_attn") is None:
        raise ConfigError("hardware.attention", choice, f"{others} (the package flash-attn is not installed)")
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError("hardware.attention", choice, f"{others}; or a GPU with model.dtype=bfloat16 (the model is in "
                          f"{str(dtype).removeprefix('torch.')} on {device.type})")
    return "ragged"


def padding(implementation: str, prefill_chunk: int, num_drafted: int = 0) -> int:
    """Positions that a row needs after its sequence, for padding or for a block drafted beyond the end.

    With a mask, all padding can share one position. flash-attn has no mask: it treats the queries as the last tokens of a
    row. Each token of padding therefore needs its own position.
    """
    return max(prefill_chunk if implementation == "ragged" else 1, num_drafted + 1)


def grouped_attention(
    module: torch.nn.Module | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **kwargs,
) -> tuple[torch.Tensor, None]:
    """Softmax attention.

    Args:
        query: (rows, heads, queries, dim). key, value: (rows, key heads, keys, dim).
        attention_mask: (rows, 1, queries, keys). A bool mask is True where a query may look; any other mask is added to
            the scores. None for causal attention.

    Returns:
        (rows, queries, heads, dim), and None for the weights.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ConfigError("hardware.attention", "grouped", "eager, for a model with attention sinks or a soft-cap")
    rows, heads, queries, dim = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    groups = heads // key_heads
    if attention_mask is None:
        attention_mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)[None, None]
    if attention_mask.dtype == torch.bool:
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, -torch.inf)
    scale = dim**-0.5 if scaling is None else scaling
    grouped = (query * scale).reshape(rows, key_heads, groups * queries, dim)
    heads_first = key.stride(1) > key.stride(0)  # pages are gathered so; a product in another order would copy them
    if heads_first:
        grouped, key, value, attention_mask = (x.transpose(0, 1) for x in (grouped, key, value, attention_mask))
    scores = torch.matmul(grouped, key.transpose(2, 3))
    scores = scores.view(*key.shape[:2], groups, queries, keys).add_(attention_mask[:, :, None])
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = torch.matmul(weights.view(*key.shape[:2], groups * queries, keys), value)
    if heads_first:
        mixed = mixed.transpose(0, 1)
    return mixed.reshape(rows, heads, queries, -1).transpose(1, 2), None


def ragged_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor,
    scaling: float | None = None, dropout: float = 0.0, **kwargs,
) -> tuple[torch.Tensor, None]:
    """Softmax attention by flash-attn. The mask gives only the filled length of each row.

    The queries are the last tokens of their row.
    """
    from flash_attn import flash_attn_with_kvcache

    filled = attention_mask[:, 0, -1].sum(dim=-1, dtype=torch.int32)
    mixed = flash_attn_with_kvcache(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), cache_seqlens=filled,
                                    softmax_scale=scaling, causal=True)
    return mixed, None


for _name, _function in (("grouped", grouped_attention), ("ragged", ragged_attention)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, sdpa_mask)
