"""Blends: changes of the target's last hidden state before its head, or of its logits."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from dflash_mcmc.components import Component, Settings, identity, name_of
from dflash_mcmc.engine.batching.interface import ChainTarget, Hidden, TargetBlend
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.model import Model
from dflash_mcmc.tokenizer import PromptEncoder
from dflash_mcmc.types import Problem

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching import language_model, plan


class Blend(Component, TargetBlend):
    """Base class of blends. A subclass defines `mix`, and what `mix` reads: layers of the target, a draft, or a companion."""

    __slots__ = ()

    group = "blend"
    needs_companion: ClassVar[bool] = False
    """Whether `mix` takes the logits of another model that is fed the same tokens."""
    has_prompts: ClassVar[bool] = False
    """Whether that model is the target itself, under the prompts of `second_prompts`."""

    def companion(self, target: "language_model.LanguageModel") -> "language_model.LanguageModel | None":
        """The model whose logits `mix` takes, on the target's device; None without one. Raises UserError if it is unfit."""
        return None

    def companion_shape(self, target: "plan.TargetShape") -> "plan.TargetShape | None":
        """What is known of that model without loading it; None without one, or before its download. Raises UserError.

        Weights that it shares with the target are not counted.
        """
        return None

    def second_prompts(self, config: Settings, model: ChainTarget | PromptEncoder, problems: Sequence[Problem],
                       prompts: Mapping[str, np.ndarray]) -> Mapping[bytes, np.ndarray]:
        """The companion's prompts by the bytes of the target's; empty if it reads the same. Raises UserError.

        Args:
            prompts: token ids by the ids of problems.
        """
        return MappingProxyType({})

    def check_model(self, model: Model) -> None:
        """Checks, without loading weights, that the companion fits a target. Raises UserError."""

    def auxiliary(self, tapped: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden | None:
        """What `mix` adds a share of, made from the tapped layers. None for a blend that taps none."""
        return None

    @abstractmethod
    def mix(self, last: Hidden, tapped: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """The blended state, of any shape. It is linear in the arguments, which can be hidden states for one head, or logits.

        A blend with `needs_companion` takes logits alone, and need not be linear.

        Args:
            last: the target's last hidden state, after its final norm.
            tapped: outputs of the tapped layers; for a blend with `needs_draft`, only the draft's hidden state; for one with
                `needs_companion`, only the companion's logits.
            final_norm: the target's final norm.
        """

    def other(self) -> Self:
        """The blend with share 1, whose mixture is only what this one mixes in."""
        own: Any = self  # every blend but `none` has the field
        alone: Self = replace(own, beta=1.0)
        return alone


@dataclass(kw_only=True)
class LogitsBlend(Blend):
    """Base class of blends of two logits. Fields: the share of the second, and the mask."""

    __slots__ = ()

    beta: float = identity(0.05, "share of the second logits; below 0 the blend moves away from them, above 1 beyond them",
                           ge=-10, le=10)
    alpha_mask: float = identity(0.0, "only tokens with at least this share of the target's largest probability can be drawn; "
                                "0 = all tokens", ge=0, le=1)

    def check(self, config: Settings) -> None:
        """Checks that the sampler draws no token that the mask forbids. Raises ConfigError."""
        sampler = config.sampler
        draws = "sampler" in config.probe.sources()
        if draws and self.alpha_mask and (sampler.source() != "blended" or sampler.needs_draft):
            other = "0, or sampler.proposal=matched" if sampler.source() == "base" else "0"
            raise ConfigError("blend.alpha_mask", self.alpha_mask, f"{other} with sampler={name_of(sampler)}, which here "
                              "draws tokens without the blend: a chain could begin where the target has probability zero")

    def other(self) -> Self:
        """See `Blend.other`. It masks no token, and its logits are those of the second model or prompt."""
        return replace(self, beta=1.0, alpha_mask=0.0)

    def mix(self, last: Hidden, others: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """(1 - beta) * last + beta * others[0] of logits (..., vocabulary).

        It is -inf where `last` is, and where the mask forbids: p(x) < alpha_mask * max p of the target.
        """
        with np.errstate(invalid="ignore"):  # at -inf, which the end of this function puts back
            mixed = (1.0 - self.beta) * last + self.beta * others[0]
        allowed = last != -np.inf
        if self.alpha_mask:
            best = last.max(-1, keepdims=True) if isinstance(last, np.ndarray) else last.amax(dim=-1, keepdim=True)
            allowed &= last >= best + np.log(self.alpha_mask)
        if isinstance(mixed, np.ndarray):
            return np.where(allowed, mixed, -np.inf)
        return mixed.masked_fill(~allowed, -np.inf)
