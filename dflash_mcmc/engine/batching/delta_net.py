"""Layers of the gated delta rule on a `HybridCache`, computed token by token.

`transformers` computes a prompt in chunks of 64 tokens and a decode step by the recurrence. The results differ in their last
bits, and a chunk ends in one state for all its tokens, padding included. Here every forward goes token by token. A state then
depends only on the inputs before it, and each token's state can be kept.

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

Source: Gated Delta Networks (arXiv 2412.06464), equation 10, as Qwen3-Next and Qwen3.5 compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.activations import ACT2FN

from dflash_mcmc.engine.batching.cache import PIECE
from dflash_mcmc.engine.batching.ladder import round_up
from dflash_mcmc.engine.batching.recurrent_state import HybridCache, RecurrentLayer

_ROW_STEP = 8
"""A projection has the same bits in every batch whose number of rows is a multiple of it (notebook, "Bits")."""


class _Projected(NamedTuple):
    """Projections of tokens: inputs of the convolution (rows, queries, channels), and gates."""

    mixed: torch.Tensor
    gate: torch.Tensor
    """(rows, queries, heads, value_dim), of the output."""
    rate: torch.Tensor
    """float32 (rows, queries, heads), beta."""
    decay: torch.Tensor
    """float32 (rows, queries, heads), exp(g)."""


def install(nets: Sequence[Any]) -> None:
    """Lets these layers compute by `mix` on a `HybridCache`. Their other forwards stay those of `transformers`."""
    for net in nets:
        net.forward = MethodType(_forward, net)


def _forward(net: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    cache = kwargs.get("cache", kwargs.get("cache_params"))  # its name since transformers 5.24, and before
    if isinstance(cache, HybridCache):
        return mix(net, hidden_states, cache.layers[net.layer_idx])
    return type(net).forward(net, hidden_states, **kwargs)


def mix(net: Any, hidden: torch.Tensor, layer: RecurrentLayer) -> torch.Tensor:
    """The output of a layer, (rows, queries, width), for inputs of that shape. Keeps the states in `layer`."""
    rows, queries = hidden.shape[:2]
    (windows, matrices), projected = layer.begin(hidden), _project(net, hidden)
    mixed = torch.cat([windows, projected.mixed], dim=1)
    query, key, value = _convolve(net, mixed)
    query, key = _normed(query) / net.head_k_dim**0.5, _normed(key)
    outputs = list[torch.Tensor]()
    for index in range(queries):
        matrices = _step(matrices, key[:, index], value[:, index], projected.decay[:, index], projected.rate[:, index])
        outputs.append((matrices * query[:, index, ..., None]).sum(dim=-2))
        layer.keep(index, mixed[:, index + 1 : index + 1 + windows.shape[1]], matrices)
    together = torch.stack(outputs, dim=1).to(hidden.dtype).view(-1, net.head_v_dim)
    normed = net.norm(together, projected.gate.reshape(-1, net.head_v_dim))
    return net.out_proj(normed.view(rows, queries, -1))


def replay(nets: Sequence[Any], cache: HybridCache, rows: np.ndarray, positions: np.ndarray) -> None:
    """Makes the states of rows at these positions recent, each int64 (rows,), from the last snapshots and the inputs.

    The inputs before these positions are known. Rows whose state is recent already are left out.
    """
    missing = cache.known[rows] != positions
    rows, positions = rows[missing], positions[missing]
    if not len(rows):
        return
    device = cache.recent.matrices.device
    numbers = positions // cache.every
    start = numbers * cache.every
    row_ids, counts, kept = (torch.from_numpy(array).to(device) for array in (rows, positions - start, numbers))
    longest = round_up(int((positions - start).max()), _ROW_STEP)
    at = torch.from_numpy(np.minimum(start[:, None] + np.arange(longest), cache.length - 1)).to(device)
    for layer, net in enumerate(nets):
        windows, matrices = cache.snapshots.get(layer, row_ids, kept)
        for first in range(0, longest, PIECE):
            inputs = cache.inputs[layer][row_ids[:, None], at[:, first : first + PIECE]]
            windows, matrices = _advance(net, inputs, windows, matrices, counts - first)
        cache.recent.put(layer, row_ids, torch.from_numpy(positions % cache.num_recent).to(device), windows, matrices)
    cache.known[rows] = positions


def _advance(net: Any, hidden: torch.Tensor, windows: torch.Tensor, matrices: torch.Tensor,
             counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The states after the first `counts` of the tokens of each row, int64 (rows,)."""
    projected = _project(net, hidden)
    mixed = torch.cat([windows, projected.mixed], dim=1)
    _, key, value = _convolve(net, mixed)
    key, queries = _normed(key), hidden.shape[1]
    for index in range(queries):
        after = _step(matrices, key[:, index], value[:, index], projected.decay[:, index], projected.rate[:, index])
        matrices = torch.where((index < counts)[:, None, None, None], after, matrices)
    last = counts.clamp(0, queries)[:, None] + torch.arange(windows.shape[1], device=counts.device)
    return mixed[torch.arange(len(mixed), device=counts.device)[:, None], last], matrices


def _step(matrices: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor,
          rate: torch.Tensor) -> torch.Tensor:
    """The recurrence over one token. Every number depends on its own row and head alone, in a fixed order of additions."""
    matrices = matrices * decay[..., None, None]
    change = (value - (matrices * key[..., None]).sum(dim=-2)) * rate[..., None]
    return matrices + key[..., None] * change[..., None, :]


def _project(net: Any, hidden: torch.Tensor) -> _Projected:
    """The projections of Qwen3.5, or of Qwen3-Next, which interleaves them."""
    if hasattr(net, "in_proj_qkvz"):
        query, key, value, gate, rate, decay = net.fix_query_key_value_ordering(net.in_proj_qkvz(hidden),
                                                                                net.in_proj_ba(hidden))
        mixed = torch.cat([tensor.flatten(2) for tensor in (query, key, value)], dim=-1)
    else:
        mixed, gate = net.in_proj_qkv(hidden), net.in_proj_z(hidden).unflatten(-1, (-1, net.head_v_dim))
        rate, decay = net.in_proj_b(hidden), net.in_proj_a(hidden)
    log_decay = -net.A_log.float().exp() * torch.nn.functional.softplus(decay.float() + net.dt_bias)
    return _Projected(mixed, gate, rate.sigmoid().float(), log_decay.exp())


def _convolve(net: Any, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, float32 (rows, queries, heads, dim), of inputs that begin with a window."""
    weights = net.conv1d.weight.squeeze(1).float()
    taps, queries = weights.shape[1], mixed.shape[1] - weights.shape[1] + 1
    total = mixed[:, :queries].float() * weights[:, 0]
    for tap in range(1, taps):
        total = total + mixed[:, tap : tap + queries].float() * weights[:, tap]
    if net.conv1d.bias is not None:
        total = total + net.conv1d.bias.float()
    active = ACT2FN[net.activation](total.to(mixed.dtype)).float()
    query, key, value = active.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    groups = net.num_v_heads // net.num_k_heads
    query, key = (tensor.unflatten(-1, (-1, net.head_k_dim)).repeat_interleave(groups, dim=2) for tensor in (query, key))
    return query, key, value.unflatten(-1, (-1, net.head_v_dim))


def _normed(heads: torch.Tensor) -> torch.Tensor:
    """Heads divided by their length."""
    return heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + 1e-6)
