"""DoLa: mixes in the logits of the layer that is farthest from the target, chosen for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dflash_mcmc.blend import MASK_HELP, Hidden, LogitsBlend
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config


@register("blend", "dola")
@dataclass(slots=True, kw_only=True)
class DolaBlend(LogitsBlend):
    """logits = (1 - beta) * target + beta * head(h_layer), with the layer of the largest Jensen-Shannon divergence (DoLa).

    Decoding by contrasting layers (Chuang et al., arXiv 2309.03883, section 2) has beta below 0 and alpha_mask=0.1. The choice
    is a function of the prefix, so the blend is a law for every sampler. Layers are read raw, without the final norm.
    """

    beta: float = identity(-1.0, "share of the layer's logits; below 0 the blend moves away from them", ge=-10, le=1)
    alpha_mask: float = identity(0.1, MASK_HELP, ge=0, le=1)
    layers: list[int] | None = identity(None, "candidates, 0-based decoder layers, two and more; negative counts from the "
                                        "end; null = every second layer of the first half: 1, 3, 5, ...")

    def check(self, config: Config) -> None:
        """Checks that the layers exist, where the model's configuration is available, and the mask. Raises ConfigError."""
        LogitsBlend.check(self, config)
        num_layers = config.model.num_layers()
        if num_layers is not None:
            self.tapped_layers(num_layers)

    def canonical(self, config: Config) -> dict[str, object]:
        """The candidates as sorted numbers from 0."""
        num_layers = config.model.num_layers()
        return {} if num_layers is None else {"layers": list(self.tapped_layers(num_layers))}

    def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
        """The candidates, 0-based. Raises ConfigError for a layer that the model lacks, and for fewer than two."""
        given = list(range(1, num_layers // 2, 2)) if self.layers is None else self.layers
        layers = {layer % num_layers for layer in given if -num_layers <= layer < num_layers}
        if len(layers) < max(2, len(given)):
            raise ConfigError("blend.layers", self.layers, f"two and more different layers from -{num_layers} to "
                              f"{num_layers - 1} (the model has {num_layers} layers)")
        return tuple(sorted(layers))

    def mix(self, last: Hidden, others: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """The mixture with the farthest of the candidates' logits (..., vocabulary); the first one if several are."""
        import torch

        own = torch.as_tensor(last)
        p, chosen, farthest = own.softmax(dim=-1), own, torch.full_like(own[..., 0], -torch.inf)
        for layer in map(torch.as_tensor, others):  # one after another: logits of a batch are large
            of_both = (p + (q := layer.softmax(dim=-1))) / 2
            less, more, middle = (torch.special.xlogy(law, law).sum(dim=-1) for law in (p, q, of_both))
            apart = (less + more) / 2 - middle
            farther = (apart > farthest) | apart.isnan()  # a layer whose logits are no numbers ends the chain
            chosen, farthest = torch.where(farther[..., None], layer, chosen), torch.where(farther, apart, farthest)
        return LogitsBlend.mix(self, last, [chosen.numpy() if isinstance(last, np.ndarray) else chosen], final_norm)
