"""Linear layers that read the same input, as one product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dflash_mcmc.engine.batching import piecewise_product
from dflash_mcmc.engine.batching.piecewise_product import PiecewiseProduct

Names = tuple[tuple[str, ...], ...]
"""Names of layers of one module that read the same tensor, in the order of their calls."""
TARGET: Names = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
DRAFT: Names = (("v_proj", "k_proj"), ("gate_proj", "up_proj"))
"""Names in a draft. The queries of a block are not computed together with its keys, because the context has no queries."""


class JointProduct:
    """One product for some linear layers. The first call with a tensor computes all of them.

    Args:
        layers: layers with the same number of inputs.
        piece, most: see `PiecewiseProduct`.
    """

    def __init__(self, layers: Sequence[torch.nn.Linear], piece: int, most: int = 1):
        self.layers, self._sizes = layers, [layer.out_features for layer in layers]
        self._piece, self._most, self._versions = piece, most, [-1]
        self.refresh()
        self._rows: torch.Tensor | None = None
        self._found: Sequence[torch.Tensor] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the transposed weights."""
        return self._product.num_bytes

    def of_layer(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """The output of a layer."""
        if len(self._sizes) == 1:
            return self._product(rows, self.bias)
        if self._rows is not rows:
            found = self._product(rows, self.bias).split(self._sizes, dim=-1)
            self._found = found if rows.numel() == rows.shape[-1] else [part.contiguous() for part in found]
            self._rows = rows
        result = self._found[number]
        if number == len(self._sizes) - 1:  # a tensor that is changed in place later is not taken for the same
            self._rows, self._found = None, ()
        return result

    def multiply(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The output of all layers, with another bias."""
        return self._product(rows, bias)

    def refresh(self) -> None:
        """Takes weights and biases that were changed in place since the last time, as far as PyTorch counts changes."""
        given = [tensor for layer in self.layers for tensor in (layer.weight, layer.bias) if tensor is not None]
        versions = [0 if tensor.is_inference() else tensor._version for tensor in given]
        if versions != self._versions:
            self._product = PiecewiseProduct(torch.cat([layer.weight for layer in self.layers]), self._piece, self._most)
            self.bias, self._versions = self._biases(), versions

    def is_current(self) -> bool:
        """Whether the layers still have the weights and biases of the product, by the bits of a random row."""
        weight = torch.cat([layer.weight for layer in self.layers])
        biases = self._biases()
        same = self.bias is None if biases is None else self.bias is not None and torch.equal(biases, self.bias)
        return same and piecewise_product.agrees(self._product, weight, biases, 1, range(3, 4))

    def _biases(self) -> torch.Tensor | None:
        biases: list[torch.Tensor] = [layer.bias for layer in self.layers if layer.bias is not None]
        return torch.cat(biases) if biases else None


def products(network: torch.nn.Module, most: int, together: Names) -> dict[torch.nn.Linear, tuple[JointProduct, int]] | None:
    """The product of each linear layer and the layer's number in it; None if one has not the bits of eight rows.

    Args:
        most: largest number of rows.
        together: `TARGET` or `DRAFT`.
    """
    found: dict[torch.nn.Linear, tuple[JointProduct, int]] = {}
    for layers in _groups(network, together):
        single = [piecewise_product.find(layer.weight, layer.bias, most) for layer in layers]
        pieces = {None if product is None else product.piece for product in single}
        if None in pieces:
            return None
        alike = len(pieces) == 1 and len({layer.bias is None for layer in layers}) == 1
        for members in [layers] if alike else [[layer] for layer in layers]:
            piece = next(product.piece for layer, product in zip(layers, single, strict=True)
                         if layer is members[0] and product is not None)
            joint = JointProduct(members, piece, most)
            found.update({layer: (joint, number) for number, layer in enumerate(members)})
    return found


def linears(network: torch.nn.Module) -> list[torch.nn.Linear]:
    """All linear layers of a decoder or a draft."""
    return [module for module in network.modules() if type(module) is torch.nn.Linear]


def _groups(network: torch.nn.Module, together: Names) -> Iterator[list[torch.nn.Linear]]:
    """The linear layers, those that read the same tensor together."""
    for module in network.modules():
        layers = {name: child for name, child in module.named_children() if type(child) is torch.nn.Linear}
        for names in together:
            if set(names) <= set(layers) and len({layers[name].in_features for name in names}) == 1:
                yield [layers.pop(name) for name in names]
        yield from ([layer] for layer in layers.values())
