"""No probe: samples are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_mcmc.registry import register


@register("probe", "none")
@dataclass(slots=True, kw_only=True)
class NoProbe:
    """No probe: samples are drawn."""
