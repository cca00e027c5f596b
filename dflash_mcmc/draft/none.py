"""No draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.registry import register

if TYPE_CHECKING:
    from dflash_mcmc.engine.language_model import LanguageModel


@register("draft", "none")
@dataclass(slots=True, kw_only=True)
class NoDraft:
    """No draft."""

    def load(self, target: LanguageModel) -> None:
        """Nothing."""
        return None
