"""Layer blend: mixes a share of the logits of one or several intermediate layers into the target's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from dflash_mcmc.blend import Blend, Hidden
from dflash_mcmc.components import Settings, identity, register
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.rng import Key

if TYPE_CHECKING:
    import torch


@register("blend", "layer")
@dataclass(slots=True, kw_only=True)
class LayerBlend(Blend):
    """logits = (1 - beta) * head(h_last) + beta * head(h_layer): "LogitBlend" of the guided-power-sampling document.

    Both terms go through the same linear head, so one product with the mixed hidden state gives the same result. `h_last`
    is the input of the model's head, after its final norm; `h_layer` is the output of the decoder layer itself. beta below 0
    moves the target away from the layer. The law is defined for every real beta, because all logits are finite and softmax
    normalises them.

    `direction=random` (the preset blend=noise) is the control of the document's authors: h_layer is turned by a fixed random
    rotation, which keeps its norm and nothing of what it says. The rotation changes the order of the dimensions and their
    signs. The turned state is a function of the prefix, so the target is a law for every sampler.
    """

    beta: float = identity(0.05, "share of the layer's logits; below 0 the blend moves away from the layer", ge=-10, le=1)
    layer: int = identity(-3, "0-based decoder layer; negative counts from the end (-3 is 33 of 36)")
    norm: Literal["none", "final"] = identity(
        "none", "norm of the layer's hidden state before the head: none, as published; final = the model's final norm")
    direction: Literal["layer", "random"] = identity(
        "layer", "layer = the layer's hidden state; random = the same state turned by a fixed random rotation, a control with "
        "equal norm")

    def check(self, config: Settings) -> None:
        """Checks that the layer exists, where the model's configuration is available. Raises ConfigError."""
        num_layers = config.model.num_layers()
        if num_layers is not None:
            self.tapped_layers(num_layers)

    def canonical(self, config: Settings) -> dict[str, object]:
        """The layer as a number from 0. Layers -3 and 33 of 36 therefore have the same identity."""
        num_layers = config.model.num_layers()
        return {} if num_layers is None else {"layer": self.tapped_layers(num_layers)[0]}

    def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
        """The decoder layer whose output `mix` takes, 0-based. Raises ConfigError for a layer that the model lacks."""
        if not -num_layers <= self.layer < num_layers:
            raise ConfigError("blend.layer", self.layer, f"-{num_layers} to {num_layers - 1} (the model has {num_layers} "
                              "layers)")
        return (self.layer % num_layers,)

    def mix(self, last: Hidden, tapped: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """(1 - beta) * last + beta * tapped[0], in the precision of the arguments; any shape."""
        return (1.0 - self.beta) * last + self.beta * self.auxiliary(tapped, final_norm)

    def auxiliary(self, tapped: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """The layer's state after the norm, turned with direction=random."""
        hidden = final_norm(tapped[0]) if self.norm == "final" else tapped[0]
        return _turned(hidden) if self.direction == "random" else hidden


def _turned(hidden: Hidden) -> Hidden:
    """The states (..., d) after a fixed random rotation of the d dimensions: their order and their signs change."""
    if isinstance(hidden, np.ndarray):
        order, signs = _rotation(hidden.shape[-1])
        return hidden[..., order] * signs
    places, factors = _rotation_on(hidden.shape[-1], str(hidden.device))
    return hidden[..., places] * factors.to(hidden.dtype)


@lru_cache(maxsize=8)
def _rotation(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The order and the signs, +1 or -1, of `size` dimensions: the same on every machine."""
    numbers = Key(0).fold_in("blend", "random", size).uniforms(0, 2 * size)
    return np.argsort(numbers[:size], kind="stable"), np.where(numbers[size:] < 0.5, -1.0, 1.0)


@lru_cache(maxsize=8)
def _rotation_on(size: int, device: str) -> "tuple[torch.Tensor, torch.Tensor]":
    """The same on a device. They are kept, because a CUDA graph cannot copy from the host."""
    import torch  # the tabular engine needs none

    order, signs = _rotation(size)
    return torch.as_tensor(order, device=device), torch.as_tensor(signs, device=device)
