"""A DSpark checkpoint: a DFlash network whose slots are corrected by the token before, with an optional confidence head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.draft import CheckpointDraft
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.slotwise import SlotwiseDrafter
    from dflash_mcmc.settings import Settings


@register("draft", "dspark")
@dataclass(slots=True, kw_only=True)
class DSparkDraft(CheckpointDraft):
    """A DSpark checkpoint (arXiv 2607.05147) of DeepSpec or SpecForge: a folder, or a hub name.

    One forward of the network serves a block. Its tokens are drawn one after another, because the Markov head corrects the
    law of each one by the token before it. The rules take these corrected laws as q.
    """

    path: str = runtime("deepseek-ai/dspark_qwen3_4b_block7", "folder of a checkpoint, or a hub name; its content is part of "
                        "the identity, but its location is not")
    confidence_threshold: float = identity(0.0, "a block ends before the first slot whose confidence is below it; 0 proposes "
                                           "whole blocks. It changes no law", ge=0, le=1)

    presets = ("tiny_dspark",)
    is_slotwise = True
    example = "deepseek-ai/dspark_qwen3_4b_block7"

    def check(self, config: Settings) -> None:
        """Checks that the checkpoint exists, and that it has a confidence head for a threshold. Raises UserError."""
        CheckpointDraft.check(self, config)
        folder = self._checkpoint().config_folder()
        if self.confidence_threshold and folder is not None and not self._shape(folder).confidence:
            raise ConfigError("draft.confidence_threshold", self.confidence_threshold, "0: the draft has no confidence head")

    def load(self, target: LanguageModel) -> SlotwiseDrafter:
        from dflash_mcmc.engine.speculative.slotwise import SlotwiseDrafter

        network = self.network(target)
        if self.confidence_threshold and not network.shape.confidence:
            raise ConfigError("draft.confidence_threshold", self.confidence_threshold, "0: the draft has no confidence head")
        return SlotwiseDrafter(network, target, self.confidence_threshold)
