"""Speculative sampling by rejection: drafted tokens are kept with probability min(1, p / q)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dflash_mcmc.components import Settings, identity, register
from dflash_mcmc.decoder import SpeculativeDecoder
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.ops import LARGEST

if TYPE_CHECKING:
    from dflash_mcmc.engine.speculative import rules
    from dflash_mcmc.engine.speculative.drafter import Drafter


@register("decoder", "speculative_rejection")
@dataclass(slots=True, kw_only=True)
class SpeculativeRejection(SpeculativeDecoder):
    """Keep a drafted token with probability min(1, p / q); replace the first rejected one from (p - q)+.

    Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). The tokens have the same
    law as in plain decoding. With the same seed, plain decoding draws other tokens.
    """

    draft_temperature: float | None = identity(None, "temperature of the draft; null takes the sampler's own, 0 proposes its "
                                               "most likely tokens", ge=0, le=LARGEST)
    verification: Literal["token", "block"] = identity(
        "token", "unit of verification: token = each token by itself; block = the longest prefix that passes, on average at "
        "least as long as with token (Sun et al. 2024, arXiv 2403.10444)")
    fault: (Literal["argmax_proposal", "reject_then_p", "residual_by_draft_noise", "unprocessed_draft", "late_penalty",
                    "block_residual"] | None) = identity(
        None, "a known mistake instead of the rule, for experiment=faults alone")

    def check(self, config: Settings) -> None:
        """Checks that a fault is run in experiment=faults and with the rule that has it. Raises ConfigError."""
        super().check(config)
        needed = "block" if self.fault == "block_residual" else "token"
        if self.fault is not None and self.verification != needed:
            raise ConfigError("decoder.verification", self.verification, f"{needed} with decoder.fault={self.fault}")

    def speculation(self, drafter: "Drafter | None") -> "rules.Speculation":
        from dflash_mcmc.engine.speculative import rules

        right = rules.reject_block if self.verification == "block" else rules.reject
        faults = rules.REJECTION | rules.BLOCK
        rule, fault = faults[self.fault] if self.fault else (right, rules.Fault())
        return rules.Speculation(rule or right, drafter, shared_noise=False, temperature=self.draft_temperature, noisy=True,
                           fault=fault, trace=self.trace)
