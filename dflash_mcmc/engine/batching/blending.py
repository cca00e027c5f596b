"""The interface between an engine and a blend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch

Hidden = TypeVar("Hidden", "torch.Tensor", "np.ndarray")


class TargetBlend(Protocol):
    """Changes the target's last hidden state before its head."""

    @property
    def needs_draft(self) -> bool:
        """Whether `mix` takes the draft's hidden state instead of outputs of the target's layers."""

    def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
        """The decoder layers of the target, 0-based, whose outputs `mix` takes."""

    def mix(self, last: Hidden, tapped: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """The blended state. The function is linear, so its arguments may be hidden states or the logits of one head."""

    def restarts_grid(self) -> bool:
        """Whether the draft's blocks start where an operation starts, instead of at fixed tokens of the generation."""


class Unblended:
    """The model itself as target. An engine uses this class if it is given no blend."""

    needs_draft = False

    def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
        """No layer besides the last is needed."""
        return ()

    def mix(self, last: Hidden, tapped: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """The last hidden state, unchanged."""
        return last

    def restarts_grid(self) -> bool:
        """No draft takes part."""
        return False
