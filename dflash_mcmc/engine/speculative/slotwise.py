"""Drafts whose slots depend on the tokens drafted before them in the block, although the network runs once per block.

The law of a drafted token x_j is q_j(. | anchor, x_0, ..., x_(j-1)). It is known only when the tokens before it are drawn, so
that the tokens are drawn slot by slot. Each slot's logits are given to the engine, which draws from them and keeps them as the
q of every rule. A marginal law, or the network's logits without the correction, is another law: with it rejection is wrong.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from dflash_mcmc.draft.network.dflash.network import DFlash
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative.drafter import Anchors, DFlashDrafter, DrawTokens


class SlotwiseNetwork(DFlash):
    """A DFlash network whose logits are corrected by the token before each slot."""

    @abstractmethod
    def corrected(self, base: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor,
                  state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of one slot, float32 (rows, vocabulary), and the state for the next slot.

        Args:
            base: float32 (rows, vocabulary), the head's logits of `hidden`.
            hidden: (rows, hidden), the network's output for the slot.
            previous: int64 (rows,), the token before the slot: the anchor for the first one.
            state: the state after the slot before; None in the first slot.
        """

    def confidence_logits(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        """Logits, float32 (rows,), of the probability that the slot's token is accepted; None without a confidence head.

        They do not depend on the slot's own token. The arguments are those of `corrected`.
        """
        return None

    def along(self, base: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """See `DFlash.along`."""
        state, slots = None, []
        for slot in range(base.shape[1]):
            logits, state = self.corrected(base[:, slot], hidden[:, slot], previous[:, slot], state)
            slots.append(logits)
        return torch.stack(slots, dim=1)


class SlotwiseDrafter(DFlashDrafter):
    """Drafts slot by slot with a `SlotwiseNetwork`. The network always gets a whole block, as in its training.

    Args:
        network: the network with its weights, on the target's device.
        target: the target; the network uses its embedding and head.
        threshold: a block ends before the first slot whose confidence is below it; 0 for whole blocks. The confidence of a
            slot is known before its token is drawn, so that the threshold has no effect on the law of the target's tokens.
    """

    network: SlotwiseNetwork

    def __init__(self, network: SlotwiseNetwork, target: LanguageModel, threshold: float = 0.0):
        super().__init__(network, target, network.shape.block_size)
        self.num_drafted, self.threshold = network.shape.num_drafted, threshold

    def hidden(self, anchors: Anchors) -> torch.Tensor:
        return self._rows(anchors, self.network.shape.block_size)[:, self.network.shape.first_row :]

    def propose(self, anchors: Anchors, draw: DrawTokens) -> torch.Tensor:
        hidden = self.hidden(anchors)
        base, previous, state, drafted = self.logits(hidden), anchors.fed(), None, []
        for slot in range(self.num_drafted):
            offered = self._is_confident(hidden[:, slot], previous)
            logits, state = self.network.corrected(base[:, slot], hidden[:, slot], previous, state)
            previous = draw(logits[:, None], slot, offered)[:, 0]
            drafted.append(previous)
        return torch.stack(drafted, dim=1)

    def _is_confident(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        if self.threshold <= 0.0:
            return None
        logits = self.network.confidence_logits(hidden, previous)
        return None if logits is None else torch.sigmoid(logits) >= self.threshold
