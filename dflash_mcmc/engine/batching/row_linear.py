"""Linear layers on a CPU in which the bits of a row do not depend on the number of rows.

Large layers in float32, and all in bfloat16, have weights in oneDNN's own order ("packed"). Such a product is faster than one
that packs its weights at each call (notebook, "Packed products"), and keeps the bits from two rows on. A call of it costs more
than a small product in float32. Small layers have PyTorch's own product, which keeps the bits of multiples of four rows. An
Intel processor with AMX multiplies bfloat16 in tiles and sums in an order that depends on the number of rows. There each call
has 64 rows, which cost little more than two (notebook, "Products in tiles"). Other numbers of rows are padded. `keeps_bits`
checks this on the machine that it runs on, with weights that are multiplied. Where it is not so, layers stay as they are, and
steps have rows of `ladder.py`.

Calls of 2 to 32 rows have the same bits as each other there, and take less time than one with 64 rows (notebook, "Few rows in
tiles"). An engine whose steps have no more rows takes these (`few_rows`): its bits are others than those of large batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch.nn.functional import linear, pad

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
    if not _is_packable(weight):
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


def _is_packable(weight: torch.Tensor) -> bool:
    """Whether this processor and this PyTorch have packed products of such weights."""
    if not torch.backends.mkldnn.is_available():
        return False
    bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or bfloat16


def _packed(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
