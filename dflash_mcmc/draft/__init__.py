"""What proposes tokens: each option makes a drafter of `engine/drafter.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.registry import name_of

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config


def check_features(config: Config, user: str) -> None:
    """The draft is one that reads the target's features and gives logits for a whole block. Raises ConfigError."""
    draft = name_of(config.draft)
    if draft in ("ngram", "self"):
        raise ConfigError("draft", draft, f"tiny or dflash with {user}: one forward, from the target's features, that gives "
                          "logits for a whole block")
