"""The DFlash 2 draft network: DFlash's network with convolved layers, and a selector of candidates.

Row k of a block predicts the token k places after the anchor, as in DFlash.
"""

from __future__ import annotations

import torch

from dflash_mcmc.draft.network.dflash.checkpoint import Family
from dflash_mcmc.draft.network.dflash2.config import DFlash2Config, to_config
from dflash_mcmc.draft.network.dflash2.layers import ConvolvedLayer
from dflash_mcmc.draft.network.dflash2.shape import DFlash2Shape
from dflash_mcmc.engine.speculative.slotwise import SlotwiseNetwork


class CandidateSelector(torch.nn.Module):
    """Adds a term of the pair (token before the slot, token) to the logits of the most likely tokens."""

    def __init__(self, shape: DFlash2Shape):
        super().__init__()
        self.top_k = shape.selector_top_k
        self.hidden_projection = torch.nn.Linear(shape.hidden_size, shape.selector_rank, bias=False)
        self.predecessor_codebook = torch.nn.Parameter(torch.zeros(shape.vocab_size, shape.selector_rank))
        self.successor_codebook = torch.nn.Parameter(torch.zeros(shape.vocab_size, shape.selector_rank))

    def forward(self, base: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Logits (rows, vocabulary), -inf outside the candidates; the arguments are those of `SlotwiseNetwork.corrected`.

        The candidates are the tokens with the largest `base`, before the term is added.
        """
        values, candidates = base.topk(min(self.top_k, base.shape[-1]), dim=-1)
        pair = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        term = (pair[:, None] * self.successor_codebook[candidates]).sum(dim=-1)
        return torch.full_like(base, -torch.inf).scatter(-1, candidates, values + term.float())


class DFlash2(SlotwiseNetwork):
    """The network. Its state dict is the published one."""

    shape: DFlash2Shape
    layer_type = ConvolvedLayer

    def __init__(self, shape: DFlash2Shape):
        super().__init__(shape)
        self.candidate_selector = CandidateSelector(shape)

    def corrected(self, base: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor,
                  state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.candidate_selector(base, hidden, previous), None


FAMILY = Family(DFlash2Config, DFlash2, to_config)
