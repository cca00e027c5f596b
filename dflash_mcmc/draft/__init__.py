"""Drafts: components that propose tokens. Each loads a drafter of `inference/speculative/drafter.py`."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, cast

from dflash_mcmc.components import Component
from dflash_mcmc.data.sizes import CheckpointSize
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.registry import name_of, options_with

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.inference.language_model import LanguageModel
    from dflash_mcmc.inference.speculative.drafter import DFlashDrafter, Drafter
    from dflash_mcmc.inference.target_shape import DraftSize, TargetShape


class Draft(Component):
    """Base class of drafts. A subclass defines `load`."""

    __slots__ = ()

    group = "draft"
    has_density: ClassVar[bool] = True
    """Whether the draft samples its tokens from a law, and therefore has a probability for each token."""
    reads_features: ClassVar[bool] = False
    """Whether one forward, from the target's features, gives logits for a whole block."""

    def checkpoint_size(self) -> CheckpointSize:
        """Parameters, hidden size and layers, as far as they are known without loading the draft. Raises UserError."""
        return CheckpointSize(parameters=0)

    @abstractmethod
    def load(self, target: LanguageModel) -> Drafter | None:
        """The drafter on the target's device; None for no draft. Raises UserError if draft and target do not fit."""

    def check_target(self, target: TargetShape) -> None:
        """Checks, without loading weights, that the draft fits a target. Raises UserError."""

    def size(self) -> DraftSize | None:
        """The sizes that an engine's memory plan needs; None without a draft, or before its download. Raises UserError."""
        return None


def check_features(config: Config, user: str) -> None:
    """Checks that the draft reads the target's features and gives logits for a whole block. Raises ConfigError."""
    if not config.draft.reads_features:
        able = options_with("draft", "reads_features")
        raise ConfigError("draft", name_of(config.draft), f"{able} with {user}, which needs logits for a whole block from one "
                          "forward on the target's features")


def check_adapting(config: Config, mode: str) -> None:
    """Checks that the draft may learn while it is used: that laws are kept, and that an engine uses it. Raises ConfigError.

    The law of a proposal, and a blend's target, must stay the same along a chain. What is learned from the prompt does.
    """
    if not config.probe.is_null:
        raise ConfigError("draft.adapt", mode, f"none with probe={name_of(config.probe)}; probe=adaptation measures what a "
                          "draft learns")
    for group in ("sampler", "blend"):
        user = getattr(config, group)
        if mode == "online" and (user.needs_draft or user.takes_draft):
            raise ConfigError("draft.adapt", mode, f"none or context with {group}={name_of(user)}: the draft is part of a law "
                              "there, and learning along the chain would change that law")


def load_feature_drafter(config: Config, target: LanguageModel) -> DFlashDrafter:
    """Loads the draft that `check_features` has accepted. Raises UserError if it does not fit the target."""
    return cast("DFlashDrafter", config.draft.load(target))
