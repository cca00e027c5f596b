"""Layer blend: mixes a share of an intermediate layer's logits into the target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.blend import Blend, Hidden
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config


@register("blend", "layer")
@dataclass(slots=True, kw_only=True)
class LayerBlend(Blend):
    """logits = (1 - beta) * head(h_last) + beta * head(h_layer): "LogitBlend" of the guided-power-sampling document.

    Both terms go through the same linear head, so one product with the mixed hidden state gives the same result. `h_last`
    is the input of the model's head, after its final norm; `h_layer` is the output of the decoder layer itself.
    """

    beta: float = identity("share of the layer's logits", ge=0, le=1)
    layer: int = identity("0-based decoder layer; negative counts from the end (-3 is 33 of 36)")
    norm: str = identity("norm of the layer's hidden state before the head: none, as published; final = the model's "
                         "final norm", choices=("none", "final"))

    def check(self, config: Config) -> None:
        """Checks that the layer exists, where the model's configuration is available. Raises ConfigError."""
        num_layers = config.model.num_layers()
        if num_layers is not None:
            self.tapped_layers(num_layers)

    def canonical(self, config: Config) -> dict[str, object]:
        """The layer as a number from 0, so that -3 and 33 of 36 layers have the same identity."""
        num_layers = config.model.num_layers()
        return {} if num_layers is None else {"layer": self.layer % num_layers}

    def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
        """The decoder layers whose outputs `mix` takes, 0-based. Raises ConfigError for a layer that the model lacks."""
        if not -num_layers <= self.layer < num_layers:
            raise ConfigError("blend.layer", self.layer, f"-{num_layers} to {num_layers - 1} (the model has {num_layers} "
                              "layers)")
        return (self.layer % num_layers,)

    def mix(self, last: Hidden, tapped: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """(1 - beta) * last + beta * h, in the precision of the arguments (float32 in the engines); any shape."""
        hidden = final_norm(tapped[0]) if self.norm == "final" else tapped[0]
        return (1.0 - self.beta) * last + self.beta * hidden
