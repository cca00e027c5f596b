"""Confident Decoding: the logits of the most confident of the last layers, by a search backwards over entropies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dflash_mcmc.blend import ChosenLayerBlend
from dflash_mcmc.fields import identity
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    import torch

_WINDOW = 10
"""Layers before the last in which the search goes on unless others are given: the example of vLLM's RFC 48080."""


@register("blend", "confident")
@dataclass(slots=True, kw_only=True)
class ConfidentBlend(ChosenLayerBlend):
    """logits = (1 - beta) * target + beta * head(h_layer), with the most confident of the last layers (Confident Decoding).

    For each token the search goes backwards from the last layer as long as the entropy falls (Zhang et al., arXiv
    2606.21906). beta=1 draws from the layer at which it stops. The choice is a function of the prefix, so the blend is a law
    for every sampler.
    """

    beta: float = identity(1.0, "share of the layer's logits; below 0 the blend moves away from them", ge=-10, le=1)
    layers: list[int] | None = identity(None, "candidates before the last layer, 0-based; negative counts from the end; null "
                                        "= the ten before the last")
    norm: Literal["none", "final"] = identity(
        "final", "norm of the layers' hidden states before the head: final = the model's final norm, as published; none")

    def candidates(self, num_layers: int) -> tuple[range, range]:
        """All layers but the last, whose logits are the target's own; the ten before it."""
        return range(num_layers - 1), range(max(0, num_layers - 1 - _WINDOW), num_layers - 1)

    def norms_layers(self) -> bool:
        return self.norm == "final"

    def choice(self, own: torch.Tensor, layers: Sequence[torch.Tensor]) -> torch.Tensor:
        """The logits of the layer before which the entropy falls no more; `own` if it falls nowhere."""
        import torch

        def entropy(logits: torch.Tensor) -> torch.Tensor:
            law = logits.softmax(dim=-1)
            return -torch.special.xlogy(law, law).sum(dim=-1)

        chosen, least = own, entropy(own)
        falls = torch.ones_like(least, dtype=torch.bool)
        for layer in reversed(layers):
            here = entropy(layer)
            falls = falls & ((here < least) | here.isnan())  # a layer whose logits are no numbers ends the chain
            chosen, least = torch.where(falls[..., None], layer, chosen), torch.where(falls, here, least)
        return chosen
