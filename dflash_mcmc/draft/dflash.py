"""A DFlash checkpoint: a small network that reads the target's features and proposes a block of tokens in one forward."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_mcmc.components import Settings, identity, register
from dflash_mcmc.draft import CheckpointDraft
from dflash_mcmc.errors import ConfigError

if TYPE_CHECKING:
    from dflash_mcmc.draft.network.checkpoint import Family
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter


@register("draft", "dflash")
@dataclass(slots=True, kw_only=True)
class DFlashDraft(CheckpointDraft):
    """A DFlash checkpoint (arXiv 2602.06036): a folder, or a name on the hub such as z-lab/Qwen3-4B-DFlash-b16.

    The tokens of a block are drawn independently of each other, given the target's features up to the anchor.
    """

    block_size: int | None = identity(None, "positions of a block, including its anchor; null takes the number that the draft "
                                      "was trained for, which is also the largest", ge=2)

    presets = ("tiny", "smollm2")
    example = "z-lab/Qwen3-4B-DFlash-b16"
    reads_features = is_source = True

    def family(self) -> "Family":
        from dflash_mcmc.draft.network.checkpoint import DFLASH

        return DFLASH

    def block_tokens(self, shape: Any) -> int:
        """Drafted tokens of a block. Raises ConfigError for a block that is too large."""
        if self.block_size is not None and self.block_size > shape.block_size:
            raise ConfigError("draft.block_size", self.block_size,
                              f"2 to {shape.block_size} (the draft was trained for {shape.block_size})")
        return (self.block_size or shape.block_size) - 1

    def canonical(self, config: Settings) -> dict[str, object]:
        values, folder = super().canonical(config), self._checkpoint().folder
        return {**values, "block_size": self.block_size or self._shape(folder).block_size} if folder.is_dir() else values

    def load(self, target: "LanguageModel") -> "DFlashDrafter":
        from dflash_mcmc.engine.speculative.drafter import DFlashDrafter

        network = self.network(target)
        return DFlashDrafter(network, target, self.block_tokens(network.shape) + 1)
