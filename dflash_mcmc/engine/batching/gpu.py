"""A decode step on a GPU, in Triton's kernels.

**The layers** of Llama, Qwen2, Qwen3 and DFlash drafts, with at most ten kernels in each.

A decode step on a GPU reads all weights once, and the keys and values of each row once. Modules of transformers launch some 60
kernels in a layer, each of which takes longer to launch than to run at few rows. `GpuLoop` has four products, with query, key
and value in one and gate and up in one, and Triton's kernels between them:

    _add_norm   the residual stream with what a layer adds to it, and its RMS norm
    _place      norms of heads, rotation, and the write of keys and values into the cache
    _attend     attention of the heads that share a key head, over the keys that a row sees and no more, in several parts
    _combine    the parts of `_attend`, where there are several
    _gate       silu(gate) · up

Each rounds where the modules round. Results differ from theirs by the order of sums alone. The number of parts depends on the
shape of a step and not on the length of its keys. Positions stay on the device, so that a step can be captured.

**The draw** of a plain step, in three kernels instead of 70 to 104, where the loop of layers runs.

    amax     PyTorch's: the largest logit of each row
    _weigh   sums of the weights exp(logit - maximum) over blocks of token ids
    _draw    the inverse transform, log p and log q, what ends a draw, and the state of the row

The law is that of `logits_processor.py`: float32 weights, with float64 sums first over blocks and then inside the block of the
token. Weights differ from PyTorch's by two units in the last place, and sums by their order. So a token differs only if its
uniform lies within about 1e-7 of the border of two tokens. The temperature is part of the kernels. PyTorch truncates and
penalises, since a threshold takes a sort, and takes the most likely token; the kernels draw from the logits that it leaves. A
step keeps PyTorch's draw if a row draws from other logits than the target's, or asks for further columns (`rows.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import embedding, linear

from dflash_mcmc.engine.batching.cache import CacheShape, KVCache, KVLayer
from dflash_mcmc.engine.batching.linear import HookedLoop, compared, hooked
from dflash_mcmc.engine.batching.rows import Group, Rows, Status, processed
from dflash_mcmc.engine.batching.stop_strings import FOUND, Endings
from dflash_mcmc.ops import SamplingParams

_PROGRAMS, _PARTS = 256, 16
"""Programs of `_attend` that fill a GPU, and the most parts into which they split the keys of a row."""
_TILES = {2: ((16, 64), (64, 32)), 4: ((16, 16),)}
"""Queries, each of one head, and keys that a program of `_attend` reads at once, by the bytes of a number. A product has 16 at
least. Larger tiles in float32 spill registers (notebook, "Ten kernels in a layer")."""

_GATED = 1024
"""Numbers of a program of `_gate`."""
_ROWS, _TOLERANCES = 3, {2: 0.05, 4: 1e-4}
"""Rows that are compared, and the largest relative error by the bytes of a number. In bfloat16 it grows with the layers."""
_LOG2_E = 1.4426950408889634


@triton.jit
def _exact(pointers, inside):
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _add_norm(stream, added, weight, summed, normed, width, epsilon, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    inside = at < width
    kind: tl.constexpr = stream.dtype.element_ty
    exact = _exact(stream + row + at, inside)
    if ADDS:
        exact = (exact + _exact(added + row + at, inside)).to(kind).to(tl.float32)
        tl.store(summed + row + at, exact, mask=inside)
    rounded = (exact * tl.rsqrt(tl.sum(exact * exact, 0) / width + epsilon)).to(kind).to(tl.float32)
    tl.store(normed + row + at, _exact(weight + at, inside) * rounded, mask=inside)


@triton.jit(do_not_specialize=["num_queries"])
def _place(projected, query_norm, key_norm, cosines, sines, row_ids, positions, queries, keys, values, heads, key_heads,
           num_queries, row_stride, head_stride, epsilon, NORMS: tl.constexpr, half: tl.constexpr, BLOCK: tl.constexpr):
    token, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, dim = at < half, 2 * half
    kind: tl.constexpr = projected.dtype.element_ty
    source, turn = projected + (token * (heads + 2 * key_heads) + head) * dim + at, token * dim + at
    one, two = _exact(source, inside), _exact(source + half, inside)
    if head < heads:
        target = queries + (token * heads + head) * dim + at
    else:
        row, position = tl.load(row_ids + token // num_queries), tl.load(positions + token)
        place = row * row_stride + ((head - heads) % key_heads) * head_stride + position * dim + at
        target = (keys if head < heads + key_heads else values) + place
    if head < heads + key_heads:
        if NORMS:
            scale = tl.rsqrt((tl.sum(one * one, 0) + tl.sum(two * two, 0)) / dim + epsilon)
            weight = (query_norm if head < heads else key_norm) + at
            one = ((one * scale).to(kind).to(tl.float32) * _exact(weight, inside)).to(kind).to(tl.float32)
            two = ((two * scale).to(kind).to(tl.float32) * _exact(weight + half, inside)).to(kind).to(tl.float32)
        first = (one * _exact(cosines + turn, inside)).to(kind).to(tl.float32)
        second = (two * _exact(cosines + turn + half, inside)).to(kind).to(tl.float32)
        first -= (two * _exact(sines + turn, inside)).to(kind).to(tl.float32)
        two, one = second + (one * _exact(sines + turn + half, inside)).to(kind).to(tl.float32), first
    tl.store(target, one, mask=inside)
    tl.store(target + half, two, mask=inside)


@triton.jit(do_not_specialize=["num_queries", "num_places"])
def _attend(queries, keys, values, row_ids, firsts, lasts, mixed, shares, scale, num_queries, num_places, heads, groups,
            row_stride, head_stride, FROM: tl.constexpr, SPLITS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
            dim: tl.constexpr, DIM: tl.constexpr):
    tiles = tl.cdiv(num_queries * groups, QUERIES)
    row, head, part = tl.program_id(0) // tiles, tl.program_id(1), tl.program_id(2)
    number = tl.program_id(0) % tiles * QUERIES + tl.arange(0, QUERIES)
    real, token = number < num_queries * groups, row * num_queries + number // groups
    place = token.to(tl.int64) * heads + head * groups + number % groups
    axis = tl.arange(0, DIM)
    inside = axis < dim
    query = tl.load(queries + place[:, None] * dim + axis[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    last = tl.load(lasts + token, mask=real, other=-1).to(tl.int32)
    stop, start = tl.max(last, 0) + 1, 0
    if FROM:
        first = tl.load(firsts + token, mask=real, other=2**30).to(tl.int32)
        start = tl.min(first, 0) // KEYS * KEYS
    size = tl.cdiv(tl.cdiv(stop - start, KEYS), tl.num_programs(2)) * KEYS
    begin = start + part * size
    memory = tl.load(row_ids + row) * row_stride + head * head_stride
    best = tl.full((QUERIES,), -float("inf"), tl.float32)
    total, mix = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, DIM), tl.float32)
    for block in range(begin, tl.minimum(begin + size, stop), KEYS):
        at = block + tl.arange(0, KEYS)
        there = at < stop  # nothing after a row's last token is read: it may be no number
        key = tl.load(keys + memory + at[None, :] * dim + axis[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        seen = at[None, :] <= last[:, None]
        if FROM:
            seen = seen & (at[None, :] >= first[:, None])
        scores = tl.where(seen, tl.dot(query, key, input_precision="ieee") * scale, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        finite = tl.where(higher == -float("inf"), 0.0, higher)
        weights, kept = tl.exp2(scores - finite[:, None]), tl.exp2(best - finite)
        value = tl.load(values + memory + at[:, None] * dim + axis[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        mix = mix * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total, best = total * kept + tl.sum(weights, 1), higher
    target = mixed + (part * num_places + place[:, None]) * dim + axis[None, :]
    tl.store(target, mix / tl.where(total > 0, total, 1.0)[:, None], mask=real[:, None] & inside[None, :])
    if SPLITS:
        tl.store(shares + part * num_places + place, best + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=["num_places"])
def _combine(parts, shares, mixed, num_places, PARTS: tl.constexpr, dim: tl.constexpr, DIM: tl.constexpr):
    place, part, axis = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, DIM)
    inside = axis < dim
    share = tl.load(shares + part * num_places + place)
    share = tl.exp2(share - tl.max(share, 0))
    values = tl.load(parts + (part[:, None] * num_places + place) * dim + axis[None, :], mask=inside[None, :], other=0.0)
    tl.store(mixed + place * dim + axis, tl.sum(share[:, None] * values, 0) / tl.sum(share, 0), mask=inside)


@triton.jit
def _gate(both, gated, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, gate = at < width, both + row * 2 * width + at
    exact = _exact(gate, inside)
    silu = (exact / (1.0 + tl.exp(-exact))).to(both.dtype.element_ty).to(tl.float32)
    tl.store(gated + row * width + at, silu * _exact(gate + width, inside), mask=inside)


def _power(size: int, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(size))


def normed(module: Any, stream: torch.Tensor, added: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(stream + added, its norm by a module of transformers), each (tokens, width)."""
    count, width = stream.shape
    summed, output = stream if added is None else torch.empty_like(stream), torch.empty_like(stream)
    _add_norm[(count,)](stream, stream if added is None else added, module.weight, summed, output, width,
                        module.variance_epsilon, added is not None, _power(width), num_warps=8)
    return summed, output


def attended(queries: torch.Tensor, held: KVLayer, first: torch.Tensor | None, last: torch.Tensor, heads: int,
             scale: float) -> torch.Tensor:
    """Attention (tokens, heads · dim) of queries of this shape, of the rows at which a cache is aimed.

    Args:
        first, last: int64 (rows, n), the first and the last key that a token sees; `first` may be None for 0.
    """
    key_heads, dim, (rows, num_queries) = *held.keys.shape[1::2], last.shape
    groups, places, kinds = heads // key_heads, len(queries) * heads, _TILES[queries.itemsize]
    tile, keys = next((kind for kind in kinds if kind[0] >= num_queries * groups), kinds[-1])
    tiles = rows * triton.cdiv(num_queries * groups, tile)
    parts = min(_PARTS, _power(max(1, _PROGRAMS // (tiles * key_heads)), 1))
    mixed = torch.empty_like(queries)
    split = (mixed, mixed) if parts == 1 else (
        mixed.new_empty(parts, places * dim, dtype=torch.float32), mixed.new_empty(parts, places, dtype=torch.float32))
    _attend[(tiles, key_heads, parts)](
        queries, held.keys, held.values, held.row_ids, last if first is None else first, last, *split, scale * _LOG2_E,
        num_queries, places, heads, groups, *held.keys.stride()[:2], first is not None, parts > 1, tile, keys, dim,
        _power(dim), num_stages=2)
    if parts > 1:
        _combine[(places,)](*split, mixed, places, parts, dim, _power(dim), num_warps=1)
    return mixed


def gated(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, (tokens, width), of both in a row, (tokens, 2 · width)."""
    count, width = len(both), both.shape[1] // 2
    output = both.new_empty(count, width)
    _gate[(count, triton.cdiv(width, _GATED))](both, output, width, _GATED)
    return output


def joined(layers: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights and biases of linear layers as one. Those of the layers become views of them, so that they exist once.

    Raises ValueError for layers that hold their weights otherwise, as quantised ones do.
    """
    if any(type(layer) is not torch.nn.Linear for layer in layers):
        raise ValueError(f"{type(layers[0]).__name__} is no plain linear layer")
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    sizes = [layer.out_features for layer in layers]
    for name, whole in (("weight", weight), ("bias", bias)):
        for layer, part in zip(layers, () if whole is None else whole.split(sizes), strict=whole is not None):
            setattr(layer, name, torch.nn.Parameter(part, requires_grad=False))
    return weight, bias


class _Layer:
    """A decoder layer. Its products are joined."""

    def __init__(self, module: Any):
        attention, mlp = module.self_attn, module.mlp
        self.module, self._output, self._down = module, attention.o_proj, mlp.down_proj
        self._inputs = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self._inner = joined([mlp.gate_proj, mlp.up_proj])
        self._head_norms = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        self._dim, self._scaling = attention.head_dim, attention.scaling
        self._heads = attention.q_proj.out_features // self._dim

    def run(self, stream: torch.Tensor, added: torch.Tensor | None, held: KVLayer, first: torch.Tensor | None,
            last: torch.Tensor, *rotation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream (tokens, width), and what the layer adds to it at its end. See `attended` and `_placed`."""
        stream, inputs = normed(self.module.input_layernorm, stream, added)
        queries = self._placed(linear(inputs, *self._inputs), held, self._heads, *rotation)
        mixed = attended(queries, held, first, last, self._heads, self._scaling)
        mixed = linear(mixed, self._output.weight, self._output.bias)
        stream, inputs = normed(self.module.post_attention_layernorm, stream, mixed)
        return stream, linear(gated(linear(inputs, *self._inner)), self._down.weight, self._down.bias)

    def keep(self, context: torch.Tensor, held: KVLayer, *rotation: torch.Tensor) -> None:
        """Writes the keys and values of context states (tokens, width) into the cache."""
        (weight, bias), own = self._inputs, slice(self._heads * self._dim, None)
        self._placed(linear(context, weight[own], None if bias is None else bias[own]), held, 0, *rotation)

    def _placed(self, projected: torch.Tensor, held: KVLayer, heads: int, *rotation: torch.Tensor) -> torch.Tensor:
        """Queries (tokens, heads · dim) of what is projected (tokens, ...). Keys and values go into the cache.

        Args:
            heads: of queries; 0 for keys and values alone.
            rotation: cosines and sines, each (rows, n, dim).
        """
        key_heads, half = held.keys.shape[1], self._dim // 2
        queries = projected.new_empty(len(projected), heads * self._dim)
        weights = [norm.weight for norm in self._head_norms] or [projected, projected]
        epsilon = self._head_norms[0].variance_epsilon if self._head_norms else 0.0
        _place[(len(projected), heads + 2 * key_heads)](
            projected, *weights, *rotation, held.row_ids, held.positions, queries, held.keys, held.values, heads, key_heads,
            held.positions.shape[1], *held.keys.stride()[:2], epsilon, bool(self._head_norms), half, _power(half, 1),
            num_warps=1)
        return queries


class GpuLoop(HookedLoop):
    """Runs a decoder of the families of `linear.is_looped` on a GPU, without gradients."""

    has_ranges = True

    def __init__(self, decoder: Any):
        super().__init__(decoder)
        self._layers = [_Layer(layer) for layer in decoder.layers]

    def hidden(self, tokens: torch.Tensor, cache: KVCache, first: torch.Tensor | None,
               positions: torch.Tensor) -> torch.Tensor:
        """Hidden states (rows, n, width) after the final norm; see `linear.LayerLoop.hidden`. All tensors are contiguous.

        Args:
            tokens, positions: int64 (rows, n).
            first: see `attended`.
        """
        decoder = self._decoder
        embedded = hooked(decoder.embed_tokens, (tokens,), embedding(tokens, decoder.embed_tokens.weight))
        rotation = [table.contiguous() for table in decoder.rotary_emb(embedded, positions)]
        stream, added = embedded.reshape(tokens.numel(), -1), None
        for layer, held in zip(self._layers, cache.kv_layers, strict=True):
            stream, added = layer.run(stream, added, held, first, held.positions, *rotation)
            if layer.module._forward_hooks:
                output = hooked(layer.module, (), (stream + added).view(embedded.shape))
                stream, added = output.reshape(stream.shape), None
        return normed(decoder.norm, stream, added)[1].view(embedded.shape)


class DraftLoop:
    """Runs the layers of a `DFlash` draft on a GPU, without gradients."""

    def __init__(self, network: Any):
        self._network, self._layers = network, [_Layer(layer) for layer in network.layers]

    def absorb(self, features: torch.Tensor, cache: KVCache, positions: torch.Tensor) -> None:
        """Writes keys and values of features (rows, n, features · width) to positions, int64 (rows, n), of an aimed cache."""
        fused = self._network.fc(features).flatten(0, 1)
        context, rotation = normed(self._network.hidden_norm, fused, None)[1], self._network.rotation(positions, fused.dtype)
        for layer, held in zip(self._layers, cache.kv_layers, strict=True):
            layer.keep(context, held, *rotation)

    def hidden(self, embeddings: torch.Tensor, cache: KVCache, seen: Sequence[tuple[torch.Tensor, torch.Tensor]],
               positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, of the embeddings' shape. `seen` has first and last of `attended` by layer."""
        rotation = self._network.rotation(positions, embeddings.dtype)
        stream, added = embeddings.flatten(0, 1), None
        for layer, held, ends in zip(self._layers, cache.kv_layers, seen, strict=True):
            stream, added = layer.run(stream, added, held, *ends, *rotation)
        return normed(self._network.norm, stream, added)[1].view(embeddings.shape)


def loop_of(decoder: Any, shape: CacheShape, device: torch.device) -> GpuLoop:
    """The loop of a decoder. Raises ValueError if it does not compute what the modules do.

    Args:
        shape: shape of the keys and values of a token.
    """
    loop = GpuLoop(decoder)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the memory of weights that were joined
    with torch.inference_mode():
        pairs = compared(loop, decoder, shape, _ROWS, device)
    for ours, theirs in pairs:
        error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        if not error < _TOLERANCES[shape.dtype.itemsize]:
            raise ValueError(f"its numbers differ by {error:.2g} of theirs")
    return loop


_BLOCK, _PART = tl.constexpr(512), 2048
"""Token ids whose weights are summed together, as in `logits_processor.py`, and those of a program."""
_LIVE, _DONE, _ABANDONED, _FAILED, _FOUND = (
    tl.constexpr(int(each)) for each in (Status.LIVE, Status.DONE, Status.ABANDONED, Status.FAILED, FOUND))


@triton.jit
def _weights(logits, inside, temperature, maximum):
    below = tl.div_rn(tl.load(logits, mask=inside, other=-float("inf")), temperature) - tl.div_rn(maximum, temperature)
    below = tl.maximum(below, -87.0)
    # exp(x) = 2^n exp(x - n log 2), with log 2 in two parts: a GPU's own exp errs by the rounding of x / log 2.
    whole = tl.floor(below * 1.4426950408889634 + 0.5)
    weights = tl.exp(below - whole * 0.693359375 + whole * 2.1219444e-4) * tl.exp2(whole)
    return tl.where(weights > 2.0**-125, weights, 0.0)  # see `logits_processor._LEAST`


@triton.jit
def _first_above(point, upto, weights, places, SIZE: tl.constexpr):
    """The first place of positive weight whose sum is above a point. Rounding may leave none: then the last one."""
    found = tl.min(tl.where((upto > point) & (weights > 0), places, SIZE), 0)
    return tl.minimum(found, tl.max(tl.where(weights > 0, places, 0), 0))


@triton.jit
def _weigh(target, own, temperature, maxima, own_maxima, sums, size, PART: tl.constexpr):
    row, part, law = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = part * PART + tl.arange(0, PART)
    logits = (target if law == 0 else own) + row.to(tl.int64) * size + at
    maximum = tl.load((maxima if law == 0 else own_maxima) + row)
    weights = _weights(logits, at < size, temperature if law == 1 else 1.0, maximum)
    blocks: tl.constexpr = PART // _BLOCK
    place = ((law * tl.num_programs(0) + row) * tl.num_programs(1) + part) * blocks + tl.arange(0, blocks)
    tl.store(sums + place, tl.sum(tl.reshape(weights, (blocks, _BLOCK)).to(tl.float64), 1))


@triton.jit
def _draw(target, own, temperature, maxima, own_maxima, sums, uniforms, drawn_tokens, tokens, scores, seen, counts, positions,
          lasts, origins, statuses, rounds, fed, matched, alphas, weights, floors, log_lengths, stop_ids, vocabularies,
          classes, class_rows, steps, size, length, blocks, num_stops, LAWS: tl.constexpr, FLOORS: tl.constexpr,
          STRINGS: tl.constexpr, SEEN: tl.constexpr, COUNTS: tl.constexpr, BLOCKS: tl.constexpr, STOPS: tl.constexpr):
    row, number = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    largest, maximum, at = tl.load(maxima + row), tl.load(own_maxima + row), tl.load(positions + row) + 1
    own_sums = sums + ((LAWS - 1) * tl.num_programs(0) + row) * blocks
    masses = tl.load(own_sums + number, mask=number < blocks, other=0.0)
    upto = tl.cumsum(masses, 0)
    total = tl.sum(tl.where(number == BLOCKS - 1, upto, 0.0), 0)
    of_target = total
    if LAWS == 2:
        of_target = tl.sum(tl.load(sums + row * blocks + number, mask=number < blocks, other=0.0), 0)
    point = tl.load(uniforms + row * length + at) * total
    block = _first_above(point, upto, masses, number, BLOCKS)
    before, place = tl.sum(tl.where(number == block - 1, upto, 0.0), 0), tl.arange(0, _BLOCK)
    ids = block * _BLOCK + place
    each = _weights(own + row * size + ids, ids < size, temperature, maximum).to(tl.float64)
    within = tl.cumsum(each, 0)
    chosen = _first_above(point - before, within, each, place, _BLOCK)
    token = block * _BLOCK + chosen
    low = (before + tl.sum(tl.where(place == chosen - 1, within, 0.0), 0)) / total
    high = (before + tl.sum(tl.where(place == chosen, within, 0.0), 0)) / total
    logit = tl.div_rn(tl.load(own + row * size + token), temperature)
    log_q = (logit - tl.div_rn(maximum, temperature)).to(tl.float64) - tl.log(total)
    log_p = (tl.load(target + row * size + token) - largest).to(tl.float64) - tl.log(of_target)
    tl.store(drawn_tokens + row, token)

    status = tl.load(statuses + row)
    failed = (tl.abs(largest) < float("inf")) & (tl.abs(log_q) < float("inf")) == 0
    live = status == _LIVE
    drawn = live & (failed == 0)
    slot = row * length + at
    tl.store(tokens + slot, token, mask=drawn)
    tl.store(scores + 4 * slot, log_p, mask=drawn)
    tl.store(scores + 4 * slot + 1, log_q, mask=drawn)
    tl.store(scores + 4 * slot + 2, low, mask=drawn)
    tl.store(scores + 4 * slot + 3, high, mask=drawn)
    if SEEN:
        tl.store(seen + row * size + token, 1, mask=drawn)
    if COUNTS:
        tl.store(counts + row * size + token, tl.load(counts + row * size + token) + 1.0, mask=drawn)
    tl.store(positions + row, at, mask=drawn)
    tl.store(rounds + row, tl.load(rounds + row) + 1, mask=live)
    tl.store(fed + row, tl.load(fed + row) + 1, mask=live)
    stop = tl.arange(0, STOPS)
    stops = tl.load(stop_ids + stop, mask=stop < num_stops, other=-1) == token
    ended = (tl.max(stops.to(tl.int32), 0) > 0) | (at >= tl.load(lasts + row))
    if STRINGS:
        state = tl.load(matched + row)
        kind = tl.load(classes + tl.load(vocabularies + state) + token)
        state = tl.load(steps + tl.load(class_rows + state) + kind)
        tl.store(matched + row, state, mask=drawn)
        ended = ended | (state == _FOUND)
    after = tl.where(ended, _DONE, _LIVE)
    if FLOORS:
        weight = tl.load(weights + row) + tl.where(drawn, tl.load(alphas + row) * log_p - log_q, 0.0)
        tl.store(weights + row, weight)
        bonus = tl.load(log_lengths + row)
        generated = (at - tl.load(origins + row) + 1).to(tl.float64)
        bound = weight + tl.where(tl.abs(bonus) < float("inf"), bonus - tl.log(generated), 0.0)
        after = tl.where((ended == 0) & (bound <= tl.load(floors + row)), _ABANDONED, after)
    tl.store(statuses + row, tl.where(failed, _FAILED, after), mask=live)


def drawn(state: Rows, logits: torch.Tensor, groups: Sequence[Group], endings: Endings) -> torch.Tensor:
    """Draws a token for the first rows and advances the live ones. Returns the tokens, int64 (rows,).

    Args:
        logits: float32 (rows, vocabulary), of the target.
        groups: the sampling parameters of the rows.
    """
    (rows, size), params, logits = logits.shape, groups[0].params, logits.contiguous()
    maxima = own_maxima = logits.amax(dim=-1)
    if len(groups) == 1 and params.temperature and params == SamplingParams(params.temperature):
        own, temperature = logits, float(params.temperature)
    else:
        own, temperature = processed(logits, groups, 1, state.history(rows)).contiguous(), 1.0
        own_maxima = own.amax(dim=-1)
    num_laws, parts = 1 if own is logits and temperature == 1.0 else 2, triton.cdiv(size, _PART)
    blocks = parts * (_PART // _BLOCK.value)
    tokens, sums = state.tokens.new_empty(rows), state.uniforms.new_empty(num_laws, rows, blocks)
    _weigh[(rows, parts, num_laws)](logits, own, temperature, maxima, own_maxima, sums, size, _PART)
    _draw[(rows,)](
        logits, own, temperature, maxima, own_maxima, sums, state.uniforms, tokens, state.tokens, state.scores,
        state.seen.view(torch.uint8), state.counts, state.position, state.last, state.origin, state.status, state.rounds,
        state.fed, state.matched, state.alpha, state.weight, state.floor, state.log_length, endings.ids,
        *endings.tensors, size, state.tokens.shape[1], blocks, len(endings.ids), num_laws, state.has_floors,
        endings.num_sets > 0, len(state.seen) > 0, len(state.counts) > 0, triton.next_power_of_2(blocks),
        max(2, triton.next_power_of_2(len(endings.ids))))
    return tokens
