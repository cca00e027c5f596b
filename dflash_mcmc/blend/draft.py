"""Draft blend: a share of the draft's logits in the target's, on a grid of blocks that hangs on the sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dflash_mcmc.draft import check_features
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity
from dflash_mcmc.registry import name_of, register

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config

Hidden = TypeVar("Hidden")


@register("blend", "draft")
@dataclass(slots=True, kw_only=True)
class DraftBlend:
    """logits = (1 - beta) * target + beta * draft: the draft blend of the guided-power-sampling document, made a fixed target.

    Blocks of the draft start at generated tokens 0, B, 2B, ...; the first token of each is the target's alone. The document
    lets them start where a proposal starts, so that one sequence has as many probabilities as there are cuts, and no
    Metropolis-Hastings ratio of them belongs to any target: `grid=cut` does that, for comparison.
    """

    beta: float = identity("share of the draft's logits", ge=0, le=1)
    grid: str = identity("where blocks start: absolute = at fixed tokens; cut = where a draw starts, as published: no law is "
                         "left invariant", choices=("absolute", "cut"))

    needs_draft = True

    def check(self, config: Config) -> None:
        """It takes a draft with a density and decoding token by token. Raises ConfigError."""
        check_features(config, "blend=draft")
        if name_of(config.decoder) != "plain":
            raise ConfigError("decoder", name_of(config.decoder), "plain with blend=draft: what the draft says of a block is "
                              "not known before its anchor is")

        rescores = name_of(config.sampler) == "power_mh" and config.sampler.rescore
        if self.grid == "cut" and not rescores:
            raise ConfigError("blend.grid", self.grid, "absolute; or sampler=power_mh sampler.rescore=true, which scores the "
                              "current suffix on each proposal's blocks, as published")

    def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
        """None of the target's: the draft takes its own."""
        return ()

    def mix(self, last: Hidden, drafted: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """(1 - beta) * last + beta * drafted[0]: hidden states for one head, or logits; any shape."""
        return (1.0 - self.beta) * last + self.beta * drafted[0]
