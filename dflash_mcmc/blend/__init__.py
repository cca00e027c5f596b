"""Blends: changes of the target's last hidden state before its head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from dflash_mcmc.components import Component

if TYPE_CHECKING:
    import numpy as np
    import torch

Hidden = TypeVar("Hidden", "torch.Tensor", "np.ndarray")


class Blend(Component):
    """Base class of blends. A subclass defines `mix`, and `tapped_layers` if it reads layers of the target."""

    __slots__ = ()

    group = "blend"

    def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
        """The decoder layers of the target, 0-based, whose outputs `mix` takes. Raises ConfigError for a missing layer."""
        return ()

    def auxiliary(self, tapped: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden | None:
        """What `mix` adds a share of, made from the tapped layers. None for a blend that taps none."""
        return None

    @abstractmethod
    def mix(self, last: Hidden, tapped: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """The blended state. It is linear in the arguments, which can be hidden states for one head, or logits, of any shape.

        Args:
            last: the target's last hidden state, after its final norm.
            tapped: outputs of the tapped layers; for a blend with `needs_draft`, only the draft's hidden state.
            final_norm: the target's final norm.
        """

    def restarts_grid(self) -> bool:
        """Whether the draft's blocks start where an operation starts, instead of at fixed tokens of the answer."""
        return False
