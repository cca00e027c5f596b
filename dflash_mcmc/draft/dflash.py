"""A DFlash checkpoint: a small network that reads the target's features and proposes a block of tokens in one forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dflash_mcmc.draft import CheckpointDraft, check_adapting
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    from dflash_mcmc.draft.network.checkpoint import Family
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.batching.plan import DraftSize
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.settings import Settings


@register("draft", "dflash")
@dataclass(slots=True, kw_only=True)
class DFlashDraft(CheckpointDraft):
    """A DFlash checkpoint (arXiv 2602.06036): a folder, or a name on the hub such as z-lab/Qwen3-4B-DFlash-b16.

    The tokens of a block are drawn independently of each other, given the target's features up to the anchor.
    """

    block_size: int | None = identity(None, "positions of a block, including its anchor; null takes the number that the draft "
                                      "was trained for, which is also the largest", ge=2)
    adapt: Literal["none", "context", "online"] = identity(
        "none", "whether the draft learns while it is used, by low-rank changes that begin anew with each chain: context = "
        "from the prompt, before the answer; online = from blocks that the target has verified")
    adapt_rank: int = identity(8, "rank of the changes", ge=1, le=256)
    adapt_rate: float = identity(0.003, "learning rate of Adam", gt=0, le=1)

    presets = ("tiny", "smollm2")
    example = "z-lab/Qwen3-4B-DFlash-b16"
    reads_features = is_source = True

    def family(self) -> Family:
        from dflash_mcmc.draft.network.checkpoint import DFLASH

        return DFLASH

    def block_tokens(self, shape: Any) -> int:
        """Drafted tokens of a block. Raises ConfigError for a block that is too large."""
        if self.block_size is not None and self.block_size > shape.block_size:
            raise ConfigError("draft.block_size", self.block_size,
                              f"2 to {shape.block_size} (the draft was trained for {shape.block_size})")
        return (self.block_size or shape.block_size) - 1

    def check(self, config: Settings) -> None:
        """See `CheckpointDraft.check`. A draft that learns must keep the laws."""
        CheckpointDraft.check(self, config)
        if self.adapt != "none":
            check_adapting(config, self.adapt)
            self._check_learning()

    def learns(self) -> bool:
        return self.adapt != "none"

    def canonical(self, config: Settings) -> dict[str, object]:
        """See `CheckpointDraft.canonical`. Fields of learning without effect are left out."""
        values, folder = CheckpointDraft.canonical(self, config), self._checkpoint().folder
        if self.adapt == "none" or config.decoder.keeps_tokens():
            values |= {"adapt": "none", "adapt_rank": None, "adapt_rate": None}
        return {**values, "block_size": self.block_size or self._shape(folder).block_size} if folder.is_dir() else values

    def size(self) -> DraftSize | None:
        """See `CheckpointDraft.size`. A draft that learns keeps features instead of keys and values."""
        size, folder = CheckpointDraft.size(self), self._checkpoint().config_folder()
        if size is None or folder is None or self.adapt == "none":
            return size
        from dflash_mcmc.draft.network.adaptation import features_shape

        shape, keys = self._shape(folder), size.companion
        assert keys is not None  # every DFlash checkpoint has a cache
        return size._replace(companion=features_shape(shape.target_layers, shape.hidden_size, keys.dtype),
                             token_bytes=keys.token_bytes())

    def load(self, target: LanguageModel) -> DFlashDrafter:
        from dflash_mcmc.engine.speculative.drafter import DFlashDrafter

        network = self.network(target, packs=self.adapt == "none")
        block_size = self.block_tokens(network.shape) + 1
        if self.adapt == "none":
            return DFlashDrafter(network, target, block_size)
        self._check_learning()
        from dflash_mcmc.draft.network.adaptation import AdaptiveDrafter, AdaptSettings

        return AdaptiveDrafter(network, target, block_size, AdaptSettings(self.adapt, self.adapt_rank, self.adapt_rate))

    def _check_learning(self) -> None:
        """Raises ConfigError for a draft that cannot learn."""
        if self.reduces():
            raise ConfigError("draft.adapt", self.adapt, "none with a reduced vocabulary: it would learn from tokens to which "
                              "the draft gives probability 0")
