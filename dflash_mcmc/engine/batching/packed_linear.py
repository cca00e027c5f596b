"""Linear layers on a CPU whose weights are in oneDNN's own order ("packed").

A packed product is faster than one that packs its weights at each call (notebook, "Packed products"), and the bits of a row do
not depend on the number of rows, from two on. One row is therefore multiplied as two. `keeps_bits` checks this on the machine
that it runs on, with the weights that are multiplied. Where it is not so, and in networks of small layers, where a call of oneDNN
costs more than it saves, weights stay as they are, and steps have rows of `ladder.py`.
"""

from __future__ import annotations

import torch

_SMALL = 2**16
"""Weights of a layer up to which PyTorch's own product of 8 rows is as fast (notebook, "Packed products")."""
_COUNTS = (1, 2, 3, 8, 9)
_MOST = 40
"""Numbers of rows that are compared: `_COUNTS` with the first rows of `_MOST`."""


class PackedLinear(torch.nn.Module):
    """A linear layer. It takes the place of a `torch.nn.Linear`, without gradients.

    Args:
        packed: the weights, from `packed`.
        bias: (outputs,), or None.
    """

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Outputs (..., outputs) of rows (..., inputs)."""
        return multiply(rows, self.weight, self.bias)


def multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """rows W^T + bias, (..., outputs), in the precision of the weights.

    Args:
        rows: (..., inputs).
        weight: from `packed`.
    """
    if rows.numel() != rows.shape[-1]:
        return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    pair = rows.reshape(1, -1).expand(2, -1)
    return torch.ops.mkldnn._linear_pointwise(pair, weight, bias, "none", [], "")[0].view(*rows.shape[:-1], -1)


def packed(weight: torch.Tensor) -> torch.Tensor | None:
    """The packed copy of weights (outputs, inputs); None where they are small or a product would not keep the bits of a row."""
    if weight.numel() <= _SMALL or not _is_packable(weight):
        return None
    found = _reordered(weight)
    return found if keeps_bits(found) else None


@torch.no_grad()
def pack(network: torch.nn.Module) -> bool:
    """Packs all linear layers of a network, in place. Returns whether it has: all layers are packed, or none.

    Layers that are small on average are not packed.
    A layer with one output stays: its product is one with a vector.
    """
    places = [(parent, name, layer) for parent in network.modules() for name, layer in parent._modules.items()
              if type(layer) is torch.nn.Linear and layer.out_features > 1]
    alike = {(layer.weight.shape, layer.weight.dtype): layer for _, _, layer in places}
    if sum(layer.weight.numel() for _, _, layer in places) <= _SMALL * len(places):
        return False
    if not all(_is_packable(layer.weight) and keeps_bits(_reordered(layer.weight)) for layer in alike.values()):
        return False
    made: dict[int, PackedLinear] = {}  # a layer with several places is packed once
    for parent, name, layer in places:
        if id(layer) not in made:
            made[id(layer)] = PackedLinear(_reordered(layer.weight), layer.bias)
        setattr(parent, name, made[id(layer)])
    return True


def is_packed(network: torch.nn.Module) -> bool:
    """Whether `pack` has packed a network."""
    return any(isinstance(module, PackedLinear) for module in network.modules())


@torch.no_grad()
def keeps_bits(weight: torch.Tensor) -> bool:
    """Whether the bits of a row do not depend on the number of rows, for random rows and packed weights."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_MOST, weight.shape[1], generator=generator).to(weight.dtype)
    expected = multiply(rows, weight, None)
    return all(torch.equal(multiply(rows[:count].clone(), weight, None), expected[:count]) for count in _COUNTS)


def _is_packable(weight: torch.Tensor) -> bool:
    """Whether this processor and this PyTorch have packed products of such weights."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or bfloat16


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
