"""No blend: the target is the model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dflash_mcmc.registry import register

Hidden = TypeVar("Hidden")


@register("blend", "none")
@dataclass(slots=True, kw_only=True)
class NoBlend:
    """The target is the model itself."""

    def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
        """No layer besides the last is needed."""
        return ()

    def mix(self, last: Hidden, tapped: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """The last hidden state, unchanged."""
        return last
