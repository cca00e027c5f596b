"""Linear layers on a CPU in which the bits of a row do not depend on the number of rows, the head, and the loop of layers.

Large layers in float32, and all in bfloat16, have weights in oneDNN's own order ("packed"). Such a product is faster than one
that packs its weights at each call (notebook, "Packed products"), and keeps the bits from two rows on. A call of it costs more
than a small product in float32. Small layers have PyTorch's own product, which keeps the bits of multiples of four rows. An
Intel processor with AMX multiplies bfloat16 in tiles and sums in an order that depends on the number of rows. There each call
has 64 rows, which cost little more than two (notebook, "Products in tiles"). Other numbers of rows are padded. `keeps_bits`
checks this on the machine that it runs on, with weights that are multiplied. Where it is not so, layers stay as they are, and
steps have rows of `cache.Ladder`.

Calls of 2 to 32 rows have the same bits as each other there, and take less time than one with 64 rows (notebook, "Few rows in
tiles"). An engine whose steps have no more rows takes these (`few_rows`): its bits are others than those of large batches.

The head maps hidden states to logits with sums in float32. Logits in bfloat16 would have errors of up to 0.1 nat per token,
multiplied by alpha. A product of two bfloat16 numbers is exact in float32. What matters is the precision of the sums, and not
that of the weights.

`LayerLoop` runs the layers of Llama, Qwen2 and Qwen3 as one loop, with the bits of the modules of transformers. Half of the
time of a step of few rows lies around its products: in calls of modules, and in operations of a few numbers. The loop pads
rows once and not in each product, rotates queries and keys together, and norms with one operation of PyTorch instead of five.
`loop_of` compares it with the modules on the machine that it runs on.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch.nn.functional import embedding, linear, pad, rms_norm, silu
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_mcmc.engine.batching.cache import CacheShape, KVCache, cache_argument

_SMALL = 3 * 2**15
"""Weights of a float32 layer up to which PyTorch's own product is as fast as a packed one (notebook, "Packed products")."""
_PLAIN_STEP = 4
"""PyTorch's product has multiples of so many rows."""
_TILE = 64
"""Rows of a call of a product in tiles."""
FEW = 32
"""Largest number of rows of such a call inside `few_rows`."""
_COUNTS = range(1, 10)
_MOST = 72
"""Numbers of rows that are compared: `_COUNTS` and, for `few_rows`, `_FEW_COUNTS`, with those of `_MOST`."""
_FEW_COUNTS = (16, 17, 24, 31, 32, 33, 40)


class RowLinear(torch.nn.Module):
    """A linear layer. It takes the place of a `torch.nn.Linear`, without gradients.

    Args:
        prepared: the weights, from `prepared`.
        bias: (outputs,), or None.
        few: whether the layer changes inside `few_rows`.
    """

    def __init__(self, prepared: torch.Tensor, bias: torch.Tensor | None, few: bool = False):
        super().__init__()
        self.takes_few, self.tile = few, _TILE
        self.out_features, self.in_features = prepared.shape
        self.weight = torch.nn.Parameter(prepared, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Outputs (..., outputs) of rows (..., inputs)."""
        return multiply(rows, self.weight, self.bias, self.tile)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Outputs (rows, outputs) of (rows, inputs) that lack no rows; see `num_missing`."""
        return _product(rows, self.weight, self.bias, self.tile)

    def num_missing(self, count: int) -> int:
        """Number of rows by which `count` rows are padded."""
        return _num_missing(count, self.weight, self.tile)


@contextmanager
def few_rows(network: torch.nn.Module, few: bool = True) -> Iterator[None]:
    """A context in which products of a network in tiles are made for few rows, if `few` and if they keep their bits."""
    before = {layer: layer.tile for layer in network.modules() if isinstance(layer, RowLinear)}
    for layer in before:
        layer.tile = FEW if few and layer.takes_few else _TILE
    try:
        yield
    finally:
        for layer, tile in before.items():
            layer.tile = tile


def multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: int = _TILE) -> torch.Tensor:
    """rows W^T + bias, (..., outputs), in the precision of the weights.

    Args:
        rows: (..., inputs).
        weight: from `prepared`.
        tile: most rows of a call of a product in tiles.
    """
    count = rows.numel() // rows.shape[-1]
    missing = _num_missing(count, weight, tile)
    if not missing:
        return _product(rows, weight, bias, tile)
    flat = rows.reshape(count, -1)
    padded = flat.expand(1 + missing, -1) if count == 1 else pad(flat, (0, 0, 0, missing))
    return _product(padded, weight, bias, tile)[:count].view(*rows.shape[:-1], -1)


def _num_missing(count: int, weight: torch.Tensor, tile: int) -> int:
    """Number of rows by which `count` rows are padded for a product with weights of `prepared`."""
    if _in_tiles(weight):
        return int(count % tile == 1) if tile == FEW else -count % tile
    return int(count == 1) if weight.is_mkldnn else -count % _PLAIN_STEP


def prepared(weight: torch.Tensor) -> torch.Tensor | None:
    """Weights (outputs, inputs) of `multiply`: packed, or as they are; None where the bits of a row would not be kept."""
    if weight.device.type != "cpu":
        return None
    weight = weight.detach()
    if weight.dtype == torch.float32 and is_small(weight.numel()) and keeps_bits(weight):
        return weight
    # Whether this processor and this PyTorch have packed products of such weights
    if not torch.backends.mkldnn.is_available() or not (weight.dtype == torch.float32 or (
            weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())):
        return None
    packed = _packed(weight)
    return packed if keeps_bits(packed) else None


def is_small(num_weights: int) -> bool:
    """Whether a float32 layer of so many weights is multiplied as it is."""
    return num_weights <= _SMALL


@torch.no_grad()
def replace_layers(network: torch.nn.Module) -> bool:
    """Replaces all linear layers of a network by `RowLinear`, in place, or none. Returns whether it has.

    A layer with one output stays: its product is one with a vector.
    """
    places = [(parent, name, layer) for parent in network.modules() for name, layer in parent._modules.items()
              if type(layer) is torch.nn.Linear and layer.out_features > 1]
    alike = {(layer.weight.shape, layer.weight.dtype): layer for _, _, layer in places}  # bits depend on these
    chosen = {key: prepared(layer.weight) for key, layer in alike.items()}
    if not places or any(weight is None for weight in chosen.values()):
        return False
    few = all(_in_tiles(weight) and keeps_bits(weight, FEW) for weight in chosen.values() if weight is not None)
    made: dict[int, RowLinear] = {}  # a layer with several places is replaced by one
    for parent, name, layer in places:
        if id(layer) not in made:
            weight = layer.weight.detach()
            like = chosen[weight.shape, weight.dtype]
            made[id(layer)] = RowLinear(_packed(weight) if like is not None and like.is_mkldnn else weight, layer.bias, few)
        setattr(parent, name, made[id(layer)])
    return True


def has_row_layers(network: torch.nn.Module) -> bool:
    """Whether `replace_layers` has replaced the layers of a network."""
    return any(isinstance(module, RowLinear) for module in network.modules())


@torch.no_grad()
def keeps_bits(weight: torch.Tensor, tile: int = _TILE) -> bool:
    """Whether the bits of a row do not depend on the number of rows, for random rows and weights of `multiply`."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_MOST, weight.shape[1], generator=generator).to(weight.dtype)
    expected = multiply(rows, weight, None, tile)
    counts = (*_COUNTS, *(_FEW_COUNTS if tile == FEW else ()))
    return all(torch.equal(multiply(rows[mine].clone(), weight, None, tile), expected[mine])
               for count in counts for mine in (slice(count), slice(_MOST - count, None)))


def _product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: int) -> torch.Tensor:
    if not weight.is_mkldnn:
        return linear(rows, weight, bias)
    if not _in_tiles(weight):
        return _packed_product(rows, weight, bias)
    tiles = [_packed_product(part, weight, bias) for part in rows.reshape(-1, rows.shape[-1]).split(tile)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles)).view(*rows.shape[:-1], weight.shape[0])


def _packed_product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def _in_tiles(weight: torch.Tensor) -> bool:
    """Whether products with these weights are made in tiles of rows."""
    return weight.is_mkldnn and weight.dtype == torch.bfloat16 and has_tiles()


@cache
def has_tiles() -> bool:
    """Whether this processor has tiles (AMX). PyTorch asks Linux for their use, which it may refuse."""
    return torch.cpu._is_amx_tile_supported()


def _packed(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())


_PIECE = 2**19
"""Weights that are converted to float32 at once where the device has no product with float32 sums. They stay in the cache of
a processor, so that a product is as fast as with a copy (notebook, "The engine")."""
_PIECE_STEP = 64


def keeps_copy(copied: bool | None, device: torch.device) -> bool:
    """Whether a head keeps a float32 copy of its weights; see `Float32Head`."""
    return device.type == "cpu" if copied is None else copied


def soft_capped(logits: torch.Tensor, cap: float | None, forbidden: torch.Tensor) -> torch.Tensor:
    """cap · tanh(logits / cap), except for forbidden tokens, whose logits stay. The logits themselves without a cap.

    Args:
        forbidden: bool (vocabulary,).
    """
    return logits if cap is None else torch.where(forbidden, logits, cap * (logits / cap).tanh())


class Float32Head:
    """A linear map to logits, with sums in float32.

    Args:
        linear: the head of a model of `transformers`.
        copied: keep a copy of the weights in float32, on a CPU as `multiply` takes them. Otherwise the weights stay
            as the checkpoint has them. None means True on a CPU, where a copy is faster, and False on a GPU, where it is not.
            On a GPU, weights in float32 are never copied.

    Attributes:
        weight: (vocabulary, width).
        prepared: the weights of `multiply`; None without them.
        bias: float32 (vocabulary,), or None.
        forbidden: bool (vocabulary,), True for tokens whose logit is always -inf.
    """

    def __init__(self, linear: Any, copied: bool | None = None):
        weight = linear.weight.detach()
        copies = keeps_copy(copied, weight.device)
        self.prepared = prepared(weight.float()) if copies else None
        self.weight = weight.float() if copies and self.prepared is None else weight
        self.bias: torch.Tensor | None = None if linear.bias is None else linear.bias.detach().float()
        self.forbidden = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits (..., vocabulary) of hidden states (..., width) after the final norm."""
        if self.prepared is not None and not (torch.is_grad_enabled() and hidden.requires_grad):
            return multiply(hidden.float(), self.prepared, self.bias)
        if self.weight.dtype == torch.float32:
            return torch.nn.functional.linear(hidden.float(), self.weight, self.bias)
        flat = hidden.flatten(0, -2) if hidden.ndim > 1 else hidden[None]
        logits = self._product(flat).view(*hidden.shape[:-1], -1)
        return logits if self.bias is None else logits + self.bias

    def forbid(self, tokens: Sequence[int]) -> None:
        """Sets the logits of tokens to -inf through the bias, which needs no extra pass over the vocabulary."""
        if not len(tokens):
            return
        self.forbidden[torch.tensor(tokens, device=self.weight.device)] = True
        bias = torch.zeros(len(self.forbidden), device=self.weight.device) if self.bias is None else self.bias
        self.bias = bias.masked_fill(self.forbidden, -torch.inf)

    def _product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 (rows, vocabulary) of hidden states (rows, width), with weights that are not in float32."""
        if hidden.dtype == self.weight.dtype and hidden.device.type == "cuda":
            return torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        exact = hidden.float()
        rows = max(_PIECE // self.weight.shape[1] // _PIECE_STEP, 1) * _PIECE_STEP
        return torch.cat([exact @ piece.float().t() for piece in self.weight.split(rows)], dim=1)


Norm = Callable[[torch.Tensor], torch.Tensor]
_FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of `model_type`."""
_LOOP_COUNTS, _QUERIES = (1, 3, 8), 5
"""Rows and tokens of the forwards that are compared."""


class HookedLoop:
    """A loop over the layers of a decoder. It calls the hooks of the embedding and of layers, after them, and no others."""

    has_ranges = False
    """Whether the keys that a token sees are given by the first one, and not by a mask."""

    def __init__(self, decoder: Any):
        self._decoder, outputs = decoder, [decoder.embed_tokens, *decoder.layers]
        self._others = [hooks for module in decoder.modules() for hooks in (
            module._forward_pre_hooks, *(() if module in outputs else (module._forward_hooks,)))]

    @property
    def is_hooked(self) -> bool:
        """Whether something hooks a module that the loop does not call, so that only transformers' modules do what it asks."""
        return any(self._others)


class LayerLoop(HookedLoop):
    """Runs a decoder of `_FAMILIES` whose linear layers are `RowLinear`, without gradients. `norm_of` makes its norms."""

    def __init__(self, decoder: Any, norm_of: Callable[[Any], Norm]):
        super().__init__(decoder)
        self._norm = norm_of(decoder.norm)
        self._eager = sys.modules[type(decoder).__module__].eager_attention_forward  # not in the registry of transformers
        self._layers = [_LoopLayer(layer, norm_of) for layer in decoder.layers]
        linear = [module for module in decoder.modules() if isinstance(module, RowLinear)]
        self._unlike = list({(layer.weight.is_mkldnn, layer.weight.dtype): layer for layer in linear}.values())

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
        embedded = hooked(decoder.embed_tokens, (tokens,), embedded)
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
                if (changed := hooked(layer.module, (), output)) is not output:
                    flat = pad(changed.reshape(count, width), (0, 0, 0, len(flat) - count))
        return self._norm(flat)[:count].view(embedded.shape)


def hooked(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """A module's output after its hooks, each of which may put another one in its place."""
    for hook in module._forward_hooks.values():
        if (changed := hook(module, inputs, output)) is not None:
            output = changed
    return output


class _LoopLayer:
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


def is_looped(config: Any) -> bool:
    """Whether a loop has the layers of a configuration of `transformers`."""
    return (config.model_type in _FAMILIES and config.hidden_act == "silu"
            and not set(getattr(config, "layer_types", None) or ()) - {"full_attention"})


@torch.inference_mode()
def loop_of(decoder: Any, shape: CacheShape) -> LayerLoop | None:
    """The loop of a decoder; None for other families, and where a forward over few tokens differs in a bit.

    Args:
        shape: shape of the keys and values of a token.
    """
    if not is_looped(decoder.config) or any(type(module) is torch.nn.Linear for module in decoder.modules()):
        return None
    loops = (LayerLoop(decoder, norm_of) for norm_of in (_fused_norm, attrgetter("forward")))
    return next((loop for loop in loops if all(torch.equal(*pair) for rows in _LOOP_COUNTS
                                               for pair in compared(loop, decoder, shape, rows))), None)


def _fused_norm(module: Any) -> Norm:
    """An RMS norm as one operation, which in float32 has the bits of the five that transformers calls."""
    if module.weight.dtype != torch.float32:
        return module.forward
    weight, size, epsilon = module.weight, list(module.weight.shape), module.variance_epsilon
    return lambda rows: rms_norm(rows, size, weight, epsilon)


def compared(loop: Any, decoder: Any, shape: CacheShape, rows: int,
             device: str | torch.device = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states, keys and values of so many rows by a loop, and by the modules."""
    generator, before = torch.Generator().manual_seed(rows), decoder.config._attn_implementation
    tokens = torch.randint(decoder.config.vocab_size, (rows, _QUERIES), generator=generator).to(device)
    positions = torch.arange(_QUERIES, device=device).repeat(rows, 1)
    ours, theirs = (KVCache(shape, rows, _QUERIES, device) for _ in range(2))
    mask = torch.zeros(rows, 1, _QUERIES, _QUERIES, dtype=shape.dtype, device=device)
    mask.masked_fill_(torch.ones(_QUERIES, _QUERIES, dtype=torch.bool, device=device).triu(1), -torch.inf)
    for held in (ours, theirs):
        held.aim(slice(0, rows), positions, _QUERIES)
    decoder.set_attn_implementation("grouped")
    try:
        states = (loop.hidden(tokens, ours, None if loop.has_ranges else mask, positions),
                  decoder(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True,
                          **{cache_argument(decoder): theirs}).last_hidden_state)
    finally:
        decoder.set_attn_implementation(before)
    return [states, (ours.keys, theirs.keys), (ours.values, theirs.values)]
