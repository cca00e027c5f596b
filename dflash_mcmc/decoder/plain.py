"""Decoding token by token, with one forward of the target for each token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.components import register
from dflash_mcmc.decoder import Decoder

if TYPE_CHECKING:
    from dflash_mcmc.engine.speculative.drafter import Drafter


@register("decoder", "plain")
@dataclass(slots=True, kw_only=True)
class Plain(Decoder):
    """Decoding token by token, with one forward of the target for each token."""

    is_null = True

    def speculation(self, drafter: "Drafter | None") -> None:
        """Returns None, because nothing is drafted."""
        return None
