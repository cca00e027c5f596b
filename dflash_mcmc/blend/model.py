"""Model blend: mixes a share of another causal language model's logits into the target's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.blend import LogitsBlend
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import runtime
from dflash_mcmc.model import ModelBeside
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.batching.plan import TargetShape
    from dflash_mcmc.model import Model
    from dflash_mcmc.settings import Settings


@dataclass(slots=True, kw_only=True)
class _Subtracted(ModelBeside):
    """The model of `anti_model`."""

    group = "blend"

    @property
    def _field(self) -> str:
        return "blend.anti_model"


@register("blend", "model")
@dataclass(slots=True, kw_only=True)
class ModelBlend(ModelBeside, LogitsBlend):
    """logits = (1 - beta) * target + beta * other, where `other` is a second model with the same tokenizer.

    With `anti_model` the logits are target + beta * (other - anti_model): an expert and an anti-expert (DExperts, Liu et al.,
    arXiv 2105.03023), or a tuned and an untuned small model (proxy tuning, Liu et al., arXiv 2401.08565).

    beta below 0 is contrastive decoding with an amateur, in the form of O'Brien and Lewis (arXiv 2309.09117); beta above 0 is
    an ensemble. `alpha_mask` is the plausibility constraint of Li et al. (arXiv 2210.15097, section 3.3). The other model
    reads the same tokens, so its logits are a function of the prefix, and the blend is a law for every sampler.
    """

    anti_model: str | None = runtime(None, "a model that is subtracted in place of the target, as blend.model takes it: "
                                     "target + beta * (model - anti_model); null = the target itself")

    presets = ("contrastive",)
    needs_companion = True

    def check(self, config: Settings) -> None:
        if self.anti_model is not None and self.space == "probability":
            raise ConfigError("blend.space", self.space, "logit with blend.anti_model, whose difference has no probabilities")
        ModelBeside.check(self, config)
        for anti in self._anti():
            anti.check(config)
        LogitsBlend.check(self, config)

    def resolved(self, config: Settings) -> ModelBlend:
        """The blend with folders or hub names in place of options of `model`."""
        anti = next((each.resolved(config).model for each in self._anti()), None)
        return dataclasses.replace(ModelBeside.resolved(self, config), anti_model=anti)

    def fingerprint(self) -> str:
        own = ModelBeside.fingerprint(self)
        return " ".join([own, *(anti.fingerprint() for anti in self._anti())])

    def check_model(self, model: Model) -> None:
        ModelBeside.check_model(self, model)
        for anti in self._anti():
            anti.check_model(model)

    def companion(self, target: LanguageModel) -> LanguageModel:
        return self.load_beside(target)

    def companion_shape(self, target: TargetShape) -> TargetShape | None:
        return self.shape_beside(target.device.type)

    def anti(self, target: LanguageModel) -> LanguageModel | None:
        return next((anti.load_beside(target) for anti in self._anti()), None)

    def anti_shape(self, target: TargetShape) -> TargetShape | None:
        return next((anti.shape_beside(target.device.type) for anti in self._anti()), None)

    def subtracts(self) -> bool:
        return self.anti_model is not None

    def _anti(self) -> list[_Subtracted]:
        return [] if self.anti_model is None else [_Subtracted(model=self.anti_model, dtype=self.dtype)]
