"""Another causal language model as the draft: a small one of the target's family."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.components import identity, register
from dflash_mcmc.draft import Draft
from dflash_mcmc.model import ModelBeside

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching import language_model, plan
    from dflash_mcmc.engine.speculative.drafter import ModelDrafter


@register("draft", "model")
@dataclass(slots=True, kw_only=True)
class ModelDraft(ModelBeside, Draft):
    """Any causal language model with the target's tokenizer, as in Leviathan et al. 2023 (arXiv 2211.17192).

    It draws a block token by token, each from its own law after all tokens before, and this law is the q of every rule. It
    reads the same tokens as the target, in a cache whose rows follow the target's.
    """

    num_drafted: int = identity(4, "number of tokens of a block", ge=1, le=1024)

    presets = ("qwen2_5_coder_0_5b",)
    has_model = is_source = True

    def load(self, target: "language_model.LanguageModel") -> "ModelDrafter":
        from dflash_mcmc.engine.speculative.drafter import ModelDrafter

        return ModelDrafter(self.load_beside(target), self.num_drafted)

    def size(self) -> "plan.DraftSize | None":
        from dflash_mcmc.engine.batching import plan

        shape = self.shape_beside("cpu")
        return None if shape is None else plan.DraftSize(self.num_drafted, shape.cache_shape, model=shape)

    def num_parameters(self) -> int | None:
        with self.named():
            return self.component().num_parameters()
