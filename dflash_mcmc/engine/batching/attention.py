"""Attention over a slot cache, registered as implementations of `transformers`.

`grouped` puts the queries of all heads that share a key head into one matrix. Keys and values are read once and never
repeated for each head. On a CPU it is faster than PyTorch's fused kernel at the short lengths of decoding.
`ragged` is the kernel of the flash-attn package for caches whose rows are filled to different lengths (Dao 2023,
arXiv 2307.08691). The name avoids "flash", because `transformers` would search for a kernel under such a name.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from dflash_mcmc.errors import ConfigError

CHOICES = ("auto", "grouped", "sdpa", "eager", "flash_attention_2")

ADDITIVE = ("grouped", "eager")
"""Implementations that add the mask to the scores. The additive mask is made once per forward, not once per layer."""


class Needs(NamedTuple):
    """What the attention of a model has beside a softmax over all earlier tokens."""

    masks: bool = False
    """Windows or chunks."""
    scores: bool = False
    """Attention sinks, or a soft-cap on the scores."""


PLAIN = Needs()
_WITH_SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash")
"""`model_type` of the models with attention sinks. Their configurations have no field for them."""


def needs_of(config: Any, plain_masks: bool) -> Needs:
    """What a model with this configuration of `transformers` needs.

    Args:
        plain_masks: whether all layers attend to all earlier tokens.
    """
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return Needs(not plain_masks, capped or config.model_type in _WITH_SINKS)


def implementation(choice: str, device: torch.device, dtype: torch.dtype, needs: Needs = PLAIN) -> str:
    """The name of a choice in `transformers`' registry. Raises ConfigError if the choice cannot run."""
    if choice == "auto":
        return "grouped" if device.type == "cpu" or needs.scores else "sdpa"
    if choice == "sdpa" and needs.scores:
        raise ConfigError("hardware.attention", choice, "auto, grouped, eager for a model with attention sinks or a soft-cap")
    if choice != "flash_attention_2":
        return choice
    others = ", ".join(name for name in CHOICES if name != choice and not (name == "sdpa" and needs.scores))
    if needs != PLAIN:
        raise ConfigError("hardware.attention", choice, f"{others} for a model with windows, chunks, attention sinks or a "
                          "soft-cap")
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
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Softmax attention.

    Args:
        query: (rows, heads, queries, dim). key, value: (rows, key heads, keys, dim).
        attention_mask: (rows, 1, queries, keys). A bool mask is True where a query may look; any other mask is added to
            the scores. None for causal attention.
        softcap: the scores s become softcap · tanh(s / softcap) before the mask (Gemma 2, arXiv 2408.00118, section 2).
        s_aux: (heads,), the sink of each head: a score without a value, which takes a share of the weights (gpt-oss; Xiao et
            al. 2023, arXiv 2309.17453).

    Returns:
        (rows, queries, heads, dim), and None for the weights.
    """
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
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(*key.shape[:2], groups, queries, keys).add_(attention_mask[:, :, None])
    if s_aux is not None:
        sinks = s_aux.view(key_heads, 1, groups) if heads_first else s_aux.view(1, key_heads, groups)
        scores = torch.cat([scores, sinks[..., None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    if s_aux is not None:
        weights = weights[..., :keys]
    mixed = torch.matmul(weights.reshape(*key.shape[:2], groups * queries, keys), value)
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
