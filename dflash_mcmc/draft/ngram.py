"""Prompt lookup: proposes the tokens that followed the last occurrence of the latest tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.components import identity, register
from dflash_mcmc.draft import Draft

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching import language_model, plan
    from dflash_mcmc.engine.speculative.drafter import NgramDrafter

_LONGEST = 3
"""Longest suffix, in tokens, that is looked up. Three is the usual size in prompt lookup decoding."""


@register("draft", "ngram")
@dataclass(slots=True, kw_only=True)
class NgramDraft(Draft):
    """Proposes the tokens after the last occurrence of the latest tokens in prompt or generation. It has no density.

    The longest suffix of at most three tokens that occurs before counts.
    """

    num_drafted: int = identity(7, "number of tokens of a block", ge=1, le=1024)

    has_density = False

    def size(self) -> "plan.DraftSize":
        from dflash_mcmc.engine.batching import plan

        return plan.DraftSize(self.num_drafted)

    def load(self, target: "language_model.LanguageModel") -> "NgramDrafter":
        from dflash_mcmc.engine.speculative.drafter import NgramDrafter

        return NgramDrafter(self.num_drafted, _LONGEST)
