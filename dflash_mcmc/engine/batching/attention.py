"""Attention over a KV cache, registered as implementations of `transformers`.

`grouped` puts the queries of all heads that share a key head into one matrix. Keys and values are read once and never
repeated for each head. On a CPU it is faster than PyTorch's fused kernel at the short lengths of decoding, but for bfloat16 on
a processor with tiles (AMX), where it gives this matrix to the fused kernel.
`own` stands for the kernel of `gpu.py`, which the loop of layers on a GPU calls. Modules of `transformers` have
PyTorch's fused kernel in its place.

Rows of a cache hold the keys and values of all tokens. A layer with a window or with chunks therefore differs from one with
full attention in its mask alone, and a rollback is the same for all of them.
"""

import importlib.util
import sys
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dflash_mcmc.engine.batching.linear import has_tiles
from dflash_mcmc.errors import ConfigError

OWN = "own"
"""The implementation of a GPU that nobody has chosen."""
ADDITIVE = ("grouped", "eager")
"""Implementations that add the mask to the scores. The additive mask is made once per forward, not once per layer."""


_WITH_SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash")
"""`model_type` of the models with attention sinks. Their configurations have no field for them."""


def changes_scores(config: Any) -> bool:
    """Whether a model with this configuration of `transformers` has attention sinks, or a soft-cap on the scores."""
    return getattr(config, "attn_logit_softcapping", None) is not None or config.model_type in _WITH_SINKS


def implementation(choice: str, device: torch.device, changed_scores: bool = False) -> str:
    """The name of a choice in `transformers`' registry. Raises ConfigError if the choice cannot run."""
    if choice == "auto":
        return "grouped" if device.type == "cpu" or changed_scores else OWN if importlib.util.find_spec("triton") else "sdpa"
    if choice == "sdpa" and changed_scores:
        raise ConfigError("hardware.attention", choice, "auto, grouped, eager for a model with attention sinks or a soft-cap")
    return choice


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
    rows, heads, queries, dim, key_heads, keys = *query.shape, *key.shape[1:3]
    groups = heads // key_heads
    if attention_mask is None:
        attention_mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)[None, None]
    if attention_mask.dtype == torch.bool:
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, -torch.inf)
    scale = dim**-0.5 if scaling is None else scaling
    if key.is_cpu and key.dtype == torch.bfloat16 and has_tiles() and softcap is None and s_aux is None:
        return _fused(query, key, value, attention_mask, scale), None
    # In float32: scores of some models reach thousands, where bfloat16 has steps of 8 (notebook, "Scores in bfloat16").
    grouped = (query.float() * scale).reshape(rows, key_heads, groups * queries, dim)
    scores = torch.matmul(grouped, key.float().transpose(2, 3))
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(rows, key_heads, groups, queries, keys).add_(attention_mask[:, :, None])
    if s_aux is not None:
        sinks = s_aux.view(1, key_heads, groups, 1, 1).to(scores.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    if s_aux is not None:
        weights = weights[..., :keys]
    mixed = torch.matmul(weights.reshape(rows, key_heads, groups * queries, keys), value)
    return mixed.reshape(rows, heads, queries, -1).transpose(1, 2), None


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Scores in float32 too, but no keys are copied (notebook, "Attention in tiles")."""
    rows, heads, queries, dim = query.shape
    together = query.reshape(rows, key.shape[1], -1, dim)
    seen = mask if queries == 1 else mask.repeat(1, 1, together.shape[2] // queries, 1)
    mixed = torch.nn.functional.scaled_dot_product_attention(together, key, value, seen, scale=scale)
    return mixed.reshape(rows, heads, queries, -1).transpose(1, 2)


for _name, _function in (("grouped", grouped_attention), (OWN, sdpa_attention_forward)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, sdpa_mask)


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
    before = {name: getattr(config, name) for name in _PROBED if getattr(config, name, None) is not None}
    try:
        for name in before:
            setattr(config, name, _PROBED[name])
        tokens = torch.arange(_PROBE_TOKENS, device=device)[None] % config.vocab_size
        positions = torch.arange(_PROBE_TOKENS, device=device)
        causal = (positions <= positions[:, None])[None]
        mask = masks_of(config, decoder).of(causal, positions[None], positions, None)
        theirs = decoder(input_ids=tokens, use_cache=False).last_hidden_state
        try:
            ours = decoder(input_ids=tokens, attention_mask=mask, position_ids=positions[None], use_cache=False)
        except (AttributeError, TypeError, KeyError, ValueError):  # the model takes one mask for layers of several types
            return False
    finally:
        for name, value in before.items():
            setattr(config, name, value)
    return torch.allclose(ours.last_hidden_state.float(), theirs.float(), atol=1e-2, rtol=1e-2)
