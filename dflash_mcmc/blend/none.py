"""No blend: the target is the model itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_mcmc.blend import Blend, Hidden
from dflash_mcmc.components import register


@register("blend", "none")
@dataclass(slots=True, kw_only=True)
class NoBlend(Blend):
    """The target is the model itself."""

    is_null = True

    def mix(self, last: Hidden, tapped: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """The last hidden state, unchanged."""
        return last
