"""Sample and match: the target draws every token, and the draft decides how many draws one forward yields."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dflash_mcmc.components import Settings, identity, register
from dflash_mcmc.decoder import SpeculativeDecoder
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.ops import LARGEST

if TYPE_CHECKING:
    from dflash_mcmc.engine.speculative import rules
    from dflash_mcmc.engine.speculative.drafter import Drafter


@register("decoder", "speculative_match")
@dataclass(slots=True, kw_only=True)
class SpeculativeMatch(SpeculativeDecoder):
    """Draw the target's token at each drafted position; keep the tokens up to the first that differs from the draft's.

    Each token is drawn by the uniform of its position, as in plain decoding. With the same seed, the tokens are therefore the
    same as in plain decoding, for every draft (in float32; in half precision except at near-ties). Daliri et al. 2024
    (arXiv 2408.07978) call this drafter-invariant.
    """

    draft_temperature: float = identity(0.0, "temperature of the draft, drawn by the same uniforms as the target; 0 proposes "
                                        "its most likely tokens", ge=0, le=LARGEST)
    fault: (Literal["greedy_first", "greedy_bonus", "redraw_after_mismatch", "late_penalty", "greedy_walk", "finite_window"]
            | None) = identity(
        None, "a known mistake instead of the rule, for experiment=faults alone")
    fault_window: int | None = identity(None, "latest tokens that the target attends to when it reads a block, for "
                                        "fault=finite_window alone", ge=1)

    def check(self, config: Settings) -> None:
        """Checks that a fault changes something and that a window belongs to `finite_window`. Raises ConfigError."""
        super().check(config)
        if (self.fault == "finite_window") != (self.fault_window is not None):
            allowed = "a whole number >= 1 with" if self.fault_window is None else "null without"
            raise ConfigError("decoder.fault_window", self.fault_window, f"{allowed} decoder.fault=finite_window")

    def speculation(self, drafter: "Drafter | None") -> "rules.Speculation":
        from dflash_mcmc.engine.speculative import rules

        rule, fault = rules.matching(self.fault, self.fault_window)
        return rules.Speculation(rule, drafter, shared_noise=True, temperature=self.draft_temperature,
                           noisy=self.fault is not None, fault=fault, trace=self.trace)
