"""No draft."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.components import register
from dflash_mcmc.draft import Draft

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.language_model import LanguageModel


@register("draft", "none")
@dataclass(slots=True, kw_only=True)
class NoDraft(Draft):
    """No draft."""

    has_density = False
    is_null = True

    def load(self, target: "LanguageModel") -> None:
        return None
