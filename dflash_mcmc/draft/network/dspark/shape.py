"""The normalised content of a DSpark draft's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_mcmc.draft.network.dflash.shape import DFlashShape

HEADS = ("vanilla", "gated", "rnn")
"""Kinds of Markov heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkShape(DFlashShape):
    """The shape of a DSpark draft."""

    vocab_size: int
    """Tokens of the target's head."""
    markov_rank: int = 0
    """Rank of the Markov head; 0 for no head: the slots are then independent, as in DFlash."""
    markov_head: str = "vanilla"
    """One of `HEADS`."""
    confidence: bool = False
    """Whether it has a confidence head."""
    confidence_with_markov: bool = False
    """Whether the confidence head also reads the Markov head's vector of the token before the slot."""
    from_anchor: bool = True
    """Whether row k of a block predicts the token after its own place, the anchor's row included. Otherwise as in DFlash."""

    @property
    def first_row(self) -> int:
        """The first row of a block that predicts a drafted token."""
        return 0 if self.from_anchor else 1
