"""Model blend: mixes a share of another causal language model's logits into the target's."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.blend import LogitsBlend
from dflash_mcmc.components import Settings, register
from dflash_mcmc.model import ModelBeside

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching import language_model, plan


@register("blend", "model")
@dataclass(slots=True, kw_only=True)
class ModelBlend(ModelBeside, LogitsBlend):
    """logits = (1 - beta) * target + beta * other, where `other` is a second model with the same tokenizer.

    beta below 0 is contrastive decoding with an amateur, in the form of O'Brien and Lewis (arXiv 2309.09117); beta above 0 is
    an ensemble. `alpha_mask` is the plausibility constraint of Li et al. (arXiv 2210.15097, section 3.3). The other model
    reads the same tokens, so its logits are a function of the prefix, and the blend is a law for every sampler.
    """

    presets = ("contrastive",)
    needs_companion = True

    def check(self, config: Settings) -> None:
        ModelBeside.check(self, config)
        LogitsBlend.check(self, config)

    def companion(self, target: "language_model.LanguageModel") -> "language_model.LanguageModel":
        return self.load_beside(target)

    def companion_shape(self, target: "plan.TargetShape") -> "plan.TargetShape | None":
        return self.shape_beside(target.device.type)
