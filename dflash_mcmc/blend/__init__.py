"""Blends: changes of the target's last hidden state before its head, or of its logits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from dflash_mcmc.components import Component

if TYPE_CHECKING:
    import numpy as np
    import torch

    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.batching.plan import TargetShape
    from dflash_mcmc.model import Model

Hidden = TypeVar("Hidden", "torch.Tensor", "np.ndarray")


class Blend(Component):
    """Base class of blends. A subclass defines `mix`, and what `mix` reads: layers of the target, a draft, or a companion."""

    __slots__ = ()

    group = "blend"
    needs_companion: ClassVar[bool] = False
    """Whether `mix` takes logits: the target's, and those of another model that is fed the same tokens."""
    masks: ClassVar[bool] = False
    """Whether tokens that the target can draw may have probability zero under the blend."""

    def companion(self, target: LanguageModel) -> LanguageModel | None:
        """The model whose logits `mix` takes, on the target's device; None without one. Raises UserError if it is unfit."""
        return None

    def companion_shape(self, device: str) -> TargetShape | None:
        """What is known of that model without loading it; None without one, or before its download. Raises UserError."""
        return None

    def check_model(self, model: Model) -> None:
        """Checks, without loading weights, that the companion fits a target. Raises UserError."""

    def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
        """The decoder layers of the target, 0-based, whose outputs `mix` takes. Raises ConfigError for a missing layer."""
        return ()

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

    def restarts_grid(self) -> bool:
        """Whether the draft's blocks start where an operation starts, instead of at fixed tokens of the answer."""
        return False
