"""Measures what a draft learns while it is used: phase 1 of the plan in `deep_readout_diagnostic`, measurements 1.3 to 1.5.

1.3 asks whether the adapted draft gives an answer's tokens a higher probability than before, and than the target. 1.4 asks for
the change of tau, the mean number of tokens for each forward of the target. 1.5 is a sweep of steps, rate and rank. The
document's plan has no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, final

from typing_extensions import TypedDict

from dflash_mcmc.draft import load_feature_drafter
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity
from dflash_mcmc.forcing.answers import answers
from dflash_mcmc.probe import AnswerProbe, Summary, Unit, Work
from dflash_mcmc.registry import register
from dflash_mcmc.runner import cost
from dflash_mcmc.store.schema import AsList, Count, Long, Range
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.draft.adaptation.learning import AdaptSettings


@final
class WalkRecord(TypedDict):
    """A walk along an answer by a draft that is frozen, or that learns in one way."""

    blocks: list[Annotated[tuple[Count, Annotated[int, Range(1)]], AsList()]]
    """For each block, the place of its first token in the answer, and the tokens that it gained."""
    log_q: Annotated[list[float], Long("drafted")]
    """Log q of the compared tokens in nats, in the order of `log_p`."""
    steps: Count
    """Gradient steps."""
    dropped: Count
    """Steps that were left out, because their gradient was not finite."""


@final
class AdaptationRecord(TypedDict):
    """See `walks.Walker.record`."""

    num_tokens: Count
    """Tokens of the answer."""
    prompt_length: Count
    """Tokens of the prompt."""
    log_p: Annotated[list[float], Long("drafted")]
    """Log p of the compared tokens under the target, in nats."""
    seconds: dict[str, Annotated[float, Range(0)]]
    """Seconds of the gradient steps, by setting."""
    settings: dict[str, WalkRecord]
    """The walks, by setting; one is `frozen`."""


@register("probe", "adaptation")
@dataclass(slots=True, kw_only=True)
class Adaptation(AnswerProbe):
    """Tokens per forward and probabilities of an answer's tokens, with a frozen draft and with drafts that learn.

    An answer is teacher-forced block by block, as greedy speculation drafts it: a block begins after the tokens that are kept
    of the block before. For greedy answers this is exactly `decoder=speculative_match` with `draft.adapt`. Every combination
    of the listed values is a setting. Each answer begins anew from the checkpoint.
    """

    answers: Literal["gold", "greedy"] = "greedy"
    modes: list[Literal["context", "online"]] = identity(
        ["context", "online"], "how the draft learns, a list of: context = from the prompt; online = from verified blocks")
    modules: list[Literal["fc", "fc+attention"]] = identity(
        ["fc"], "projections that are changed, a list of: fc; fc+attention")
    ranks: list[int] = identity([8], "ranks of the changes", ge=1, le=256)
    rates: list[float] = identity([0.003], "learning rates of Adam", gt=0, le=1)
    steps: list[int] = identity([10], "numbers of steps on the prompt, for context", ge=1, le=10_000)
    blocks: int = identity(16, "blocks of the prompt in a step, for context", ge=1, le=1024)
    every_blocks: list[int] = identity([4], "verified blocks between two steps, for online", ge=1, le=1024)
    position_edges: list[int] = identity([16, 32, 64, 128, 256], "tokens of the answer at which the ranges of positions are "
                                         "divided", ge=1)

    record_type = AdaptationRecord
    tables_in = f"{__name__}.walks"
    needs_draft = True

    def check(self, config: Config) -> None:
        """Checks that the draft can learn, that lists have different values, and that the edges rise. Raises ConfigError."""
        AnswerProbe.check(self, config)
        for name in ("modes", "modules", "ranks", "rates", "steps", "every_blocks"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"probe.{name}", values, "a list of different values, at least one")
        if sorted(set(self.position_edges)) != self.position_edges:
            raise ConfigError("probe.position_edges", self.position_edges, "a list of rising numbers")

    def expected_cost(self, config: Config) -> UnitCost:
        """The cost of drawing the answer and reading it once, and drafting it with the frozen draft and in every setting."""
        once = cost.read_along(config)
        return once._replace(draft_blocks=once.draft_blocks * (1 + len(self.settings())))

    def settings(self) -> list[AdaptSettings]:
        """All combinations of the listed values."""
        from dflash_mcmc.draft.adaptation.learning import AdaptSettings

        return [AdaptSettings(mode, modules, rank, rate, pace if mode == "context" else 1, self.blocks,
                              pace if mode == "online" else 1)
                for mode in self.modes for modules in self.modules for rank in self.ranks for rate in self.rates
                for pace in (self.steps if mode == "context" else self.every_blocks)]

    def measure(self, config: Config, work: Work) -> Iterator[tuple[Unit, dict]]:
        """The blocks and log-probabilities of each answer, for the frozen draft and in every setting; see `walks.record`."""
        from dflash_mcmc.forcing.sequences import NotNumbers
        from dflash_mcmc.probe.adaptation.walks import Walker

        model = config.model.load(work.device)
        walker = Walker(load_feature_drafter(config, model, packs=False), self.settings())
        for unit, answer in answers(config, model, work, self.answers):
            if reason := answer.skipped(least=2):
                yield unit, {"skipped": reason}
                continue
            try:
                yield unit, walker.record(answer)
            except NotNumbers as error:
                yield unit, {"skipped": str(error)}

    def summarise(self, config: Config, records: list[dict]) -> Summary:
        """The tables `settings` (1.3 to 1.5), with changes against the frozen draft, and `positions` (tau by position)."""
        from dflash_mcmc.probe.adaptation import walks

        return walks.summary(records, self.settings(), self.position_edges)

    def figures(self, config: Config, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """`fig_adaptation`: tau by position, and the change of tau and of log q in every setting."""
        from dflash_mcmc.probe.adaptation import walks

        if not summary.tables["settings"]:
            return {}
        return {"fig_adaptation": walks.figure(summary.tables["settings"], summary.tables["positions"])}
