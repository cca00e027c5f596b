"""The layers of Llama, Qwen2 and Qwen3 on a CPU as one loop, with the bits of the modules of transformers.

Half of the time of a step of few rows lies around its products: in calls of modules and configurations, and in operations of a
few numbers. The loop pads rows once and not in each product, rotates queries and keys together, and norms with one operation
of PyTorch instead of five. `loop_of` compares it with the modules on the machine that it runs on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.nn.functional import embedding, pad, rms_norm, silu
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_mcmc.engine.batching.cache import CacheShape, KVCache, cache_argument
from dflash_mcmc.engine.batching.row_linear import RowLinear

Norm = Callable[[torch.Tensor], torch.Tensor]
_FAMILIES = ("LlamaModel", "Qwen2Model", "Qwen3Model")
_COUNTS, _QUERIES = (1, 3, 8), 5
"""Rows and tokens of the forwards that are compared."""


class LayerLoop:
    """Runs a decoder of `_FAMILIES` whose linear layers are `RowLinear`, without gradients. `norm_of` makes its norms."""

    def __init__(self, decoder: Any, norm_of: Callable[[Any], Norm]):
        self._decoder, self._norm = decoder, norm_of(decoder.norm)
        self._eager = sys.modules[type(decoder).__module__].eager_attention_forward  # not in the registry of transformers
        self._layers = [_Layer(layer, norm_of) for layer in decoder.layers]
        linear = [module for module in decoder.modules() if isinstance(module, RowLinear)]
        self._unlike = list({(layer.weight.is_mkldnn, layer.weight.dtype): layer for layer in linear}.values())
        outputs = [decoder.embed_tokens, *decoder.layers]
        self._others = [hooks for module in decoder.modules() for hooks in (
            module._forward_pre_hooks, *(() if module in outputs else (module._forward_hooks,)))]

    @property
    def is_hooked(self) -> bool:
        """Whether something hooks a module that the loop does not call, so that only transformers' modules do what it asks."""
        return any(self._others)

    def hidden(self, tokens: torch.Tensor, cache: KVCache, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states (rows, n, width) after the final norm. Hooks of the embedding and of layers get their outputs, and may
        change them.

        Args:
            tokens, positions: int64 (rows, n).
            mask: (rows, 1, n, keys), of all layers.
        """
        decoder = self._decoder
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(decoder.config._attn_implementation, self._eager)
        embedded = embedding(tokens, decoder.embed_tokens.weight)
        embedded = _hooked(decoder.embed_tokens, (tokens,), embedded)
        cos, sin = (table[:, :, None] for table in decoder.rotary_emb(embedded, positions))
        half = sin.shape[-1] // 2
        turned = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)  # the sign of `rotate_half`, once for all layers
        count, width = tokens.numel(), embedded.shape[-1]
        missing = max(layer.num_missing(count) for layer in self._unlike)
        flat = pad(embedded.view(count, width), (0, 0, 0, missing))
        for layer, held in zip(self._layers, cache.layers, strict=True):
            flat = layer.run(flat, tokens.shape, held, attend, mask, cos, turned)
            if layer.module._forward_hooks:
                output = flat[:count].view(embedded.shape)
                if (changed := _hooked(layer.module, (), output)) is not output:
                    flat = pad(changed.reshape(count, width), (0, 0, 0, len(flat) - count))
        return self._norm(flat)[:count].view(embedded.shape)


def _hooked(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """A module's output after its hooks, each of which may put another one in its place."""
    for hook in module._forward_hooks.values():
        if (changed := hook(module, inputs, output)) is not None:
            output = changed
    return output


class _Layer:
    """A decoder layer. Its norms and products are looked up once."""

    def __init__(self, module: Any, norm_of: Callable[[Any], Norm]):
        self.module, self._attention = module, module.self_attn
        attention, mlp = module.self_attn, module.mlp
        self._norms = [norm_of(module.input_layernorm), norm_of(module.post_attention_layernorm)]
        self._head_norms = [norm_of(attention.q_norm), norm_of(attention.k_norm)] if hasattr(attention, "q_norm") else None
        self._inputs = [attention.q_proj.product, attention.k_proj.product, attention.v_proj.product]
        self._output, self._gate, self._up, self._down = (
            layer.product for layer in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        self._dim, self._scaling = attention.head_dim, attention.scaling

    def run(self, flat: torch.Tensor, shape: torch.Size, held: Any, attend: Callable[..., tuple], mask: torch.Tensor,
            cos: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
        """The output (padded rows, width) for `flat`, whose first rows are the tokens of `shape`. `held` has keys and values.

        `cos` and `turned`, (rows, n, 1, dim), are cosines, and sines of which the first half is negative.
        """
        rows, queries = shape
        count, missing = rows * queries, len(flat) - rows * queries
        normed = self._norms[0](flat)
        query, key, value = (product(normed)[:count].view(rows, queries, -1, self._dim) for product in self._inputs)
        if self._head_norms is not None:
            query, key = self._head_norms[0](query), self._head_norms[1](key)
        both = torch.cat([query, key], dim=2)
        rotated = (both * cos).add_(both.roll(self._dim // 2, -1).mul_(turned)).transpose(1, 2)
        heads = query.shape[2]
        keys, values = held.update(rotated[:, heads:], value.transpose(1, 2))
        mixed = attend(self._attention, rotated[:, :heads], keys, values, mask, scaling=self._scaling, dropout=0.0)[0]
        mixed = mixed.reshape(count, -1)
        flat = flat + self._output(pad(mixed, (0, 0, 0, missing)) if missing else mixed)  # not in place: hooks keep the input
        normed = self._norms[1](flat)
        return flat.add_(self._down(silu(self._gate(normed)).mul_(self._up(normed))))


@torch.inference_mode()
def loop_of(decoder: Any, shape: CacheShape) -> LayerLoop | None:
    """The loop of a decoder; None for other families, and where a forward over few tokens differs in a bit.

    Args:
        shape: shape of the keys and values of a token.
    """
    config = decoder.config
    if (type(decoder).__name__ not in _FAMILIES or config.hidden_act != "silu"
            or set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
            or any(type(module) is torch.nn.Linear for module in decoder.modules())):
        return None
    before = config._attn_implementation
    decoder.set_attn_implementation("grouped")
    try:
        loops = (LayerLoop(decoder, norm_of) for norm_of in (_fused, attrgetter("forward")))
        return next((loop for loop in loops if all(_has_bits(loop, decoder, shape, rows) for rows in _COUNTS)), None)
    finally:
        decoder.set_attn_implementation(before)


def _fused(module: Any) -> Norm:
    """An RMS norm as one operation, which in float32 has the bits of the five that transformers calls."""
    if module.weight.dtype != torch.float32:
        return module.forward
    weight, size, epsilon = module.weight, list(module.weight.shape), module.variance_epsilon
    return lambda rows: rms_norm(rows, size, weight, epsilon)


def _has_bits(loop: LayerLoop, decoder: Any, shape: CacheShape, rows: int) -> bool:
    """Whether hidden states, keys and values of so many rows are those of the modules."""
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(decoder.config.vocab_size, (rows, _QUERIES), generator=generator)
    positions, caches = torch.arange(_QUERIES).expand(rows, -1), [KVCache(shape, rows, _QUERIES) for _ in range(2)]
    mask = torch.zeros(rows, 1, _QUERIES, _QUERIES, dtype=shape.dtype)
    mask.masked_fill_(torch.ones(_QUERIES, _QUERIES, dtype=torch.bool).triu(1), -torch.inf)
    for cache in caches:
        cache.aim(slice(0, rows), positions, _QUERIES)
    ours = loop.hidden(tokens, caches[0], mask, positions)
    theirs = decoder(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True,
                     **{cache_argument(decoder): caches[1]}).last_hidden_state
    return (torch.equal(ours, theirs) and torch.equal(caches[0].keys, caches[1].keys)
            and torch.equal(caches[0].values, caches[1].values))
