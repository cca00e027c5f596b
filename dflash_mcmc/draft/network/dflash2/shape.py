"""The normalised content of a DFlash 2 draft's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_mcmc.draft.network.dflash.shape import DFlashShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Shape(DFlashShape):
    """The shape of a DFlash 2 draft."""

    vocab_size: int
    """Tokens of the target's head."""
    kernel_size: int
    """Taps of a convolution: the row itself and the rows before it in the block."""
    group_size: int
    """Channels that share a dynamic coefficient; divides the hidden size."""
    selector_rank: int
    selector_top_k: int
    """Candidates of a slot: the most likely tokens by the head's logits. The other tokens have probability 0."""
