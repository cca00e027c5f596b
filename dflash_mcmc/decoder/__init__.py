"""How draws are carried out: token by token, or block by block with a draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.registry import name_of

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config

_OF_SAMPLED_DRAFTS = ("argmax_proposal", "residual_by_draft_noise", "unprocessed_draft")
"""Faults that are none where a draft names its tokens in place of drawing them."""


def check_fault(config: Config, fault: str | None, draft_temperature: float | None) -> None:
    """A fault is asked for by name, and does something. Raises ConfigError."""
    if fault is None:
        return
    if config.name != "faults":
        raise ConfigError("decoder.fault", fault, "null; a faulty decoder runs under name=faults alone (experiment=faults)")
    if fault in _OF_SAMPLED_DRAFTS and (name_of(config.draft) == "ngram" or draft_temperature == 0.0):
        raise ConfigError("decoder.fault", fault, "another, or a draft whose tokens are drawn: draft=tiny, dflash or self, "
                          "and decoder.draft_temperature not 0")
    if fault == "late_penalty" and getattr(config.sampler, "repetition_penalty", 1.0) == 1.0:
        raise ConfigError("decoder.fault", fault, "another, or a sampler.repetition_penalty that is not 1")


def canonical(config: Config) -> dict[str, object]:
    """The draft's temperature has no effect where no draft is drawn from."""
    idle = name_of(config.draft) == "ngram" or name_of(config.sampler) == "greedy"
    return {"draft_temperature": None} if idle else {}
