"""Draft and refine: the draft writes each block, and Metropolis-Hastings steps with the target's proposals refine it.

The document `speculative_mcmc_probe` (section 6.3) names draft-and-refine pipelines as a use of a draft for p^alpha, after it
has rejected the draft as a proposal. The steps are those of `power_mh`, so that their law does not depend on the draft.
"""

from dataclasses import dataclass
from typing import Literal

from dflash_mcmc.components import Need, Settings, identity, register
from dflash_mcmc.draft import check_source
from dflash_mcmc.kernel import ConfidenceCuts, Move, UniformCuts, mh_cost
from dflash_mcmc.ops import LARGEST, SMALLEST, Draw, SamplingParams, Score, Steps
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import ProposesAt, Redraws
from dflash_mcmc.types import ExpectedCost, Trajectory

_FLOOR = 0.1
"""With cut=confidence: the weight of a place whose token has probability 1. Above 0, so that every place can be a cut."""


@register("sampler", "draft_refine")
@dataclass(slots=True, kw_only=True)
class DraftRefine(Redraws, ProposesAt):
    """Draft and refine: the draft writes each block, and Metropolis-Hastings steps of the target refine it.

    Target and schedule are those of power_mh: at stage k, p(x)^alpha over the sequences that end in a stop id or are L_k
    tokens long. A stage extends the state to L_k by blocks of the draft, softmax(logits / start_temperature). A block takes
    one forward of draft and target. Then come `num_steps` steps. A step chooses a cut, draws a new suffix from the target
    at `proposal_temperature`, and accepts with probability min(1, exp(W(y) - W(x) + log c(y) - log c(x))). W sums
    alpha * log p - log q over the suffix, and c(x) is the probability of this cut in x. Each step leaves p^alpha
    invariant. The law of the result is p^alpha in the limit of many steps, and the draft's law without steps.

    With `cut=current` all places are equally likely. With `cut=confidence` place t is chosen in proportion to
    1.1 - p(x_t | x_<t). Tokens that the target finds unlikely are then redrawn more often.
    """

    start_temperature: float = identity(1.0, "temperature of the draft's blocks, at which each stage starts", ge=SMALLEST,
                                        le=LARGEST)
    cut: Literal["current", "confidence"] = identity(
        "current", "where a suffix may start: current = any place of the current sequence; confidence = any place, and more "
        "often one whose token the target finds unlikely")

    needs_draft = True
    needs = (Need("decoder.is_null", why=", whose blocks are the draft's"),)

    def check(self, config: Settings) -> None:
        check_source(config, "sampler=draft_refine")
        super().check(config)

    def move(self) -> Move:
        return Move(self.alpha, ConfidenceCuts(_FLOOR) if self.cut == "confidence" else UniformCuts())

    def power(self) -> float:
        return self.alpha

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost | None:
        """Mean cost of a chain whose answers have `length` tokens; None for cuts that depend on the target's confidence."""
        if self.cut == "confidence":
            return None
        cost, drafted = (mh_cost(length, horizon, self.num_blocks, steps) for steps in (self.num_steps, 0))
        # What the draft has drawn is scored too.
        return cost._replace(scored=length, num_draws=cost.num_draws + drafted.num_draws,
                             drafts=drafted.num_draws, drafted=length)

    def extend(self, path: Trajectory, horizon: int, key: Key) -> Steps[Trajectory]:
        """Continues the path by blocks of the draft. Its log q is that of the steps' proposals, not that of the draft."""
        drafted = yield Draw(path, horizon, SamplingParams(self.start_temperature), key, "draft")
        return (yield Score(path, drafted.tokens[path.length:], self.law(), self.source()))
