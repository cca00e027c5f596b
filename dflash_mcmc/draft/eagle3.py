"""An EAGLE-3 checkpoint: one decoder layer that drafts token by token from the target's features and its own states."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_mcmc.components import identity, register
from dflash_mcmc.draft import CheckpointDraft

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching import language_model, plan
    from dflash_mcmc.engine.speculative.drafter import EagleDrafter


@register("draft", "eagle3")
@dataclass(slots=True, kw_only=True)
class Eagle3Draft(CheckpointDraft):
    """An EAGLE-3 checkpoint (arXiv 2503.01840) of SafeAILab, SpecForge or speculators: a folder, or a hub name.

    Each token of a block is drawn from its own law, after the tokens of the block before it and the target's features before
    the anchor. This law is the q of every rule. Tokens that the draft's vocabulary lacks have probability 0.
    """

    num_drafted: int = identity(4, "number of tokens of a block", ge=1, le=1024)

    example = "RedHatAI/Qwen3-8B-speculator.eagle3"
    is_source, has_block_network = True, False

    def block_tokens(self, shape: Any) -> int:
        return self.num_drafted

    def size(self) -> "plan.DraftSize | None":
        """See `CheckpointDraft.size`. The draft's cache holds its features too."""
        from dflash_mcmc.engine.speculative.drafter import entry_shape

        size, folder = super().size(), self._checkpoint().config_folder()
        if size is None or size.companion is None or folder is None:
            return size
        return size._replace(companion=entry_shape(self._shape(folder), size.companion.dtype))

    def load(self, target: "language_model.LanguageModel") -> "EagleDrafter":
        from dflash_mcmc.engine.speculative.drafter import EagleDrafter

        return EagleDrafter(self.network(target), target, self.num_drafted)
