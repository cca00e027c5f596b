"""The DSpark draft network: DFlash's network, in which all rows of a block predict, with a Markov and a confidence head.

Row k of a block predicts the token k + 1 places after the anchor. Source: DSpark (arXiv 2607.05147).
"""

from __future__ import annotations

import torch

from dflash_mcmc.draft.network.dflash.checkpoint import Family
from dflash_mcmc.draft.network.dspark.config import DSparkConfig, to_config
from dflash_mcmc.draft.network.dspark.heads import KINDS, ConfidenceHead, MarkovHead
from dflash_mcmc.draft.network.dspark.shape import DSparkShape
from dflash_mcmc.engine.speculative.slotwise import SlotwiseNetwork


class DSpark(SlotwiseNetwork):
    """The network. Its state dict is the published one, without the copies of the target's embedding and head."""

    shape: DSparkShape
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None

    def __init__(self, shape: DSparkShape):
        super().__init__(shape)
        self.markov_head = KINDS[shape.markov_head](shape) if shape.markov_rank else None
        self.confidence_head = ConfidenceHead(shape) if shape.confidence else None

    def corrected(self, base: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor,
                  state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.markov_head is None:
            return base, None
        bias, state = self.markov_head(hidden, previous, state)
        return base + bias.float(), state

    def confidence_logits(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        if self.confidence_head is None:
            return None
        markov = self.markov_head if self.shape.confidence_with_markov else None
        return self.confidence_head(hidden, None if markov is None else markov.markov_w1(previous))


FAMILY = Family(DSparkConfig, DSpark, to_config, copies=("embed_tokens.weight", "lm_head.weight"), prefix="logit_head.")
"""Early files of SpecForge have the prefix `logit_head.` before the names of the heads."""
