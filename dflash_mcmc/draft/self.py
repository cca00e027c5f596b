"""The target as its own draft, at the decoder's draft temperature."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.components import identity, register
from dflash_mcmc.draft import Draft

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching import language_model, plan
    from dflash_mcmc.engine.speculative.drafter import SelfDrafter


@register("draft", "self")
@dataclass(slots=True, kw_only=True)
class SelfDraft(Draft):
    """The target as its own draft, token by token, at `decoder.draft_temperature`: a control, no faster than plain."""

    num_drafted: int = identity(4, "number of tokens of a block", ge=1, le=1024)

    def size(self) -> "plan.DraftSize":
        from dflash_mcmc.engine.batching import plan

        return plan.DraftSize(self.num_drafted)

    def load(self, target: "language_model.LanguageModel") -> "SelfDrafter":
        from dflash_mcmc.engine.speculative.drafter import SelfDrafter

        return SelfDrafter(self.num_drafted)
