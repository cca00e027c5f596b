"""Measures how much each token gains from blending an intermediate layer's logits, compared with a mere flattening.

The guided-power-sampling document builds on "beta = 0.05-0.1 of layer 33 beats the target on 20.5 % of hard tokens". Wins on
hard tokens alone prove little. A token is hard because the target gives it a low probability, so the target's probabilities of
hard tokens are mostly too low. Every mixture, even with a constant, moves these probabilities up (regression to the mean). The
cost of such a change appears on the easy tokens and on the hard tokens that lose. The probe therefore has controls. It
reports losses next to wins, and all and easy tokens next to hard ones. The source `flattened` blends the target with the
uniform distribution: its logits are (1 - beta) * target, a temperature of 1 / (1 - beta). It adds no information and keeps
all ranks, but it wins log p on hard tokens too. Ranks are biased in the same way, because a token with a bad rank has more
room to improve. The control for ranks is the first layers, which have used little of the context.

Raw layers can also have the opposite effect. If the residual stream has a large norm, blending it sharpens the distribution
and wins easy tokens. The last layer with norm=none shows this effect alone: it adds the target's own prediction, up to the
scale and weights of the norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NotRequired, final

from typing_extensions import TypedDict

from dflash_mcmc.draft import check_features, load_feature_drafter
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity
from dflash_mcmc.forcing.answers import answers, check_source
from dflash_mcmc.probe import ProblemProbe, Summary, Unit, Work
from dflash_mcmc.probe.columns import Table
from dflash_mcmc.probe.logit_blend import gains
from dflash_mcmc.registry import register
from dflash_mcmc.runner import cost
from dflash_mcmc.store.bounds import AsList, Count, Long, Range
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.config.schema import Config

Cell = Annotated[tuple[float, float, float, float, float, float, float, float], AsList()]
"""The sums named in `gains.SUMS`, in this order."""


@final
class BlendSums(TypedDict):
    """Sums over the hard and over the easy tokens of an answer, by source. A source has a cell for each beta."""

    hard: Annotated[dict[str, list[Cell]], Long("betas")]
    easy: Annotated[dict[str, list[Cell]], Long("betas")]


@final
class LogitBlendRecord(TypedDict):
    """See `gains.record`."""

    num_tokens: Count
    """Tokens of the answer."""
    num_hard: Count
    """Hard tokens."""
    sums: BlendSums
    seconds: NotRequired[Annotated[float, Range(0)]]
    """Seconds of the measurement. An answer that was not read has none."""


@register("probe", "logit_blend")
@dataclass(slots=True, kw_only=True)
class LogitBlend(ProblemProbe):
    """Gain of hard and easy tokens from blending other logits into the target's, by source and share.

    The blend is logits = (1 - beta) * target + beta * head(h_layer), as in `blend=layer`. There are two other sources. One is
    the draft in its usual mode, on the tokens that it predicts (all but the first token of each whole block). The other is the
    flattened target, as a control.
    """

    answers: Literal["gold", "greedy"] = identity(
        "gold", "answers to teacher-force: gold = the dataset's solutions; greedy = the target's own greedy answers")
    layers: list[int] | None = identity(None, "0-based decoder layers; negative counts from the end; null takes all")
    norm: Literal["none", "final"] = identity(
        "none", "norm between a layer's hidden state and the head: none, as published; final = the model's final norm")
    betas: list[float] = identity([0.01, 0.05, 0.1, 0.2, 0.5], "shares of the blended logits, from -10 to 1, as of "
                                  "blend=layer")
    hard_below: float = identity(0.01, "a token is hard if its probability under the target is smaller than this", gt=0, lt=1)

    uses = ("model", "draft", "dataset")
    unit = "problem"
    record_type = LogitBlendRecord
    takes_draft = True

    def check(self, config: Config) -> None:
        """Checks that the configuration suits the probe. Raises ConfigError."""
        if not self.betas or len(set(self.betas)) < len(self.betas) or not all(-10.0 <= beta <= 1.0 for beta in self.betas):
            raise ConfigError("probe.betas", self.betas, "different numbers from -10 to 1, at least one")
        num_layers = config.model.num_layers()
        if num_layers is not None:
            self.blended_layers(num_layers)
        check_source(config, "probe.answers", self.answers)
        if not config.draft.is_null:
            check_features(config, "probe=logit_blend")

    def canonical(self, config: Config) -> dict[str, object]:
        """The layers counted from 0, with null replaced by all layers. In a model of 36 layers, -3 and 33 are the same."""
        num_layers = config.model.num_layers()
        return {} if num_layers is None else {"layers": self.blended_layers(num_layers)}

    def blended_layers(self, num_layers: int) -> list[int]:
        """The decoder layers, 0-based. Raises ConfigError if there are none, if one repeats, or if the model lacks one."""
        wanted = list(range(num_layers)) if self.layers is None else self.layers
        layers = [layer % num_layers for layer in wanted if -num_layers <= layer < num_layers]
        if not wanted or len(layers) < len(wanted) or len(set(layers)) < len(layers):
            raise ConfigError("probe.layers", self.layers, f"different layers from -{num_layers} to {num_layers - 1} (the "
                              f"model has {num_layers} layers), at least one; or null")
        return layers

    @classmethod
    def columns(cls) -> tuple[Table, ...]:
        """See `Probe.columns`."""
        return gains.ALL

    def draws_answers(self) -> bool:
        """Whether the answers are the target's own."""
        return self.answers == "greedy"

    def expected_cost(self, config: Config) -> UnitCost:
        """The cost of drawing the answer and reading it once. A draft adds a second reading and the drafting of each block.

        A sequence whose states of all layers exceed the memory that `forcing.layers` allows is read more than once.
        """
        return cost.read_along(config)

    def measure(self, config: Config, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Sums over the hard and over the easy tokens of each answer; see `gains.record`."""
        from dflash_mcmc.forcing.layers import along

        model = config.model.load(work.device)
        draft = None if config.draft.is_null else load_feature_drafter(config, model)
        settings = gains.Settings(self.blended_layers(len(model.layers)), self.norm, self.betas, self.hard_below)
        yield from along(answers(config, model, work, self.answers),
                         lambda answer: gains.record(model, draft, answer, settings))

    def summarise(self, config: Config, records: list[dict]) -> Summary:
        """The tables `grid` (for all tokens), `hard` and `easy`; see `gains.summary`."""
        return gains.summary(records, self.betas)

    def figures(self, config: Config, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """`fig_logit_blend_gain`, mean gains by source and beta, and `fig_logit_blend_wins`, a few sources on hard tokens."""
        from dflash_mcmc.probe.logit_blend import figures

        if not summary.tables["grid"]:
            return {}
        hard, title = summary.tables["hard"], f"Tokens with p < {self.hard_below:g}"
        drawn = {"fig_logit_blend_gain": figures.gains({title: hard, "All tokens": summary.tables["grid"]})}
        if summary.values["num_hard"]:
            drawn["fig_logit_blend_wins"] = figures.wins(hard, title)
        return drawn
