"""DoLa: mixes in the logits of the layer that is farthest from the target, chosen for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.blend import MASK_HELP, ChosenLayerBlend
from dflash_mcmc.fields import identity
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    import torch


@register("blend", "dola")
@dataclass(slots=True, kw_only=True)
class DolaBlend(ChosenLayerBlend):
    """logits = (1 - beta) * target + beta * head(h_layer), with the layer of the largest Jensen-Shannon divergence (DoLa).

    Decoding by contrasting layers (Chuang et al., arXiv 2309.03883, section 2) has beta below 0 and alpha_mask=0.1. The choice
    is a function of the prefix, so the blend is a law for every sampler. Layers are read raw, without the final norm.
    """

    beta: float = identity(-1.0, "share of the layer's logits; below 0 the blend moves away from them", ge=-10, le=1)
    alpha_mask: float = identity(0.1, MASK_HELP, ge=0, le=1)
    layers: list[int] | None = identity(None, "candidates, 0-based decoder layers, two and more; negative counts from the "
                                        "end; null = every second layer of the first half: 1, 3, 5, ...")

    least = 2

    def candidates(self, num_layers: int) -> tuple[range, range]:
        """All layers; every second one of the first half."""
        return range(num_layers), range(1, num_layers // 2, 2)

    def choice(self, own: torch.Tensor, layers: Sequence[torch.Tensor]) -> torch.Tensor:
        """The logits of the farthest layer; of the first one if several are."""
        import torch

        p, chosen, farthest = own.softmax(dim=-1), own, torch.full_like(own[..., 0], -torch.inf)
        for layer in layers:  # one after another: logits of a batch are large
            of_both = (p + (q := layer.softmax(dim=-1))) / 2
            less, more, middle = (torch.special.xlogy(law, law).sum(dim=-1) for law in (p, q, of_both))
            apart = (less + more) / 2 - middle
            farther = (apart > farthest) | apart.isnan()  # a layer whose logits are no numbers ends the chain
            chosen, farthest = torch.where(farther[..., None], layer, chosen), torch.where(farther, apart, farthest)
        return chosen
