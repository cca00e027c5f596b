"""Draft blend: mixes a share of the draft's logits into the target's, on a block grid that depends only on the sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_mcmc.blend import Blend, Hidden
from dflash_mcmc.components import Need, Settings, identity, register
from dflash_mcmc.draft import check_features


@register("blend", "draft")
@dataclass(slots=True, kw_only=True)
class DraftBlend(Blend):
    """logits = (1 - beta) * target + beta * draft: the draft blend of the guided-power-sampling document, as a fixed target.

    Blocks of the draft start at generated tokens 0, B, 2B, .... The first token of each block has the target's logits alone.
    In the document, blocks start where a proposal starts, at a cut. The probability of a sequence then depends on the cut, so
    the Metropolis-Hastings ratios belong to no single target.
    """

    beta: float = identity(0.05, "share of the draft's logits", ge=0, le=1)

    needs_draft = True
    needs = (Need("decoder.is_null", why=", because the draft's logits for a block need the block's first token"),)

    def check(self, config: Settings) -> None:
        """Checks that the draft gives logits. Raises ConfigError."""
        check_features(config, "blend=draft")

    def mix(self, last: Hidden, drafted: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """(1 - beta) * last + beta * drafted[0]: hidden states for one head, or logits; any shape."""
        return (1.0 - self.beta) * last + self.beta * drafted[0]
