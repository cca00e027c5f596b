"""The rank of an answer's tokens when each layer's state goes through the head, with and without the final norm.

The guided-power-sampling document reports "raw lm_head(h_33) at rank 12,520" (of 36 layers and 151,936 words) and 697 for the
draft, and calls the layer a worse predictor. But the head was trained on states after the final norm, and the output of a
layer has not passed the norm. The logit lens (nostalgebraist 2020) applies the norm. Even this is biased, because directions
drift from layer to layer (Belrose et al. 2023, arXiv 2303.08112, use a learned map instead).

A root-mean-square norm does two things. It divides a state by its length, which keeps all ranks. It also multiplies each
coordinate by a weight, which changes ranks. Raw and normed ranks therefore differ only because of these weights, which reduce
the few huge coordinates of a residual stream. log p also depends on the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NotRequired, final

from typing_extensions import TypedDict

from dflash_mcmc.draft import check_features, load_feature_drafter
from dflash_mcmc.fields import identity
from dflash_mcmc.forcing.answers import answers, check_source
from dflash_mcmc.probe import ProblemProbe, Summary, Unit, Work
from dflash_mcmc.probe.columns import Table
from dflash_mcmc.probe.layer_rank import ranks
from dflash_mcmc.registry import register
from dflash_mcmc.runner import cost
from dflash_mcmc.store.bounds import AsList, Count, Long, Range
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dflash_mcmc.config.schema import Config


@final
class LayerRankRecord(TypedDict):
    """The tokens of an answer by row name (see `ranks.py`), such as `target` or `3 final`."""

    num_tokens: Annotated[Count, Long("num_tokens")]
    """Tokens of the answer."""
    num_hard: Annotated[Count, Long("num_hard")]
    """Hard tokens."""
    vocabulary: Annotated[int, Range(1)]
    """Ids that have a token."""
    hard: Annotated[list[Count], Long("num_hard")]
    """Places of the hard tokens in the answer."""
    ranks: Annotated[dict[str, list[Annotated[int, Range(1)] | None]], Long("num_tokens")]
    """The rank of each token, from 1; null where the draft does not predict it."""
    log_p: dict[str, Annotated[tuple[float, float], AsList()]]
    """Sum of log p in nats over all predicted tokens, and over the hard ones."""
    agreements: dict[str, Annotated[tuple[Count, Count], AsList()]]
    """Places at which the row's most likely token is the target's, among all predicted tokens and among the hard ones."""
    seconds: NotRequired[Annotated[float, Range(0)]]
    """Seconds of the measurement. An answer that was not read has none."""


@register("probe", "layer_rank")
@dataclass(slots=True, kw_only=True)
class LayerRank(ProblemProbe):
    """Rank and log p of an answer's tokens through the target's head from every decoder layer, raw and after the final norm.

    The draft is measured in its usual mode, on whole blocks from the answer's first token on. It does not predict the first
    token of a block, so the target is also reported on the tokens that the draft predicts.
    """

    answers: Literal["gold", "greedy"] = identity(
        "gold", "answers to teacher-force: gold = the dataset's solutions; greedy = the target's own greedy answers")
    hard_below: float = identity(0.01, "a token is hard if its probability under the target is smaller than this", gt=0, lt=1)

    uses = ("model", "draft", "dataset")
    unit = "problem"
    record_type = LayerRankRecord
    takes_draft = True

    def check(self, config: Config) -> None:
        """Checks that the configuration suits the probe. Raises ConfigError."""
        check_source(config, "probe.answers", self.answers)
        if not config.draft.is_null:
            check_features(config, "probe=layer_rank")

    @classmethod
    def columns(cls) -> tuple[Table, ...]:
        """See `Probe.columns`."""
        return ranks.ALL

    def draws_answers(self) -> bool:
        """Whether the answers are the target's own."""
        return self.answers == "greedy"

    def expected_cost(self, config: Config) -> UnitCost:
        """The cost of drawing the answer and reading it once. A draft adds a second reading and the drafting of each block.

        A sequence whose states of all layers exceed the memory that `forcing.layers` allows is read more than once.
        """
        return cost.read_along(config)

    def measure(self, config: Config, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Ranks of each answer's tokens, and sums of log p; see `ranks.record`."""
        from dflash_mcmc.forcing.layers import along

        model = config.model.load(work.device)
        draft = None if config.draft.is_null else load_feature_drafter(config, model)
        yield from along(answers(config, model, work, self.answers),
                         lambda answer: ranks.record(model, draft, answer, self.hard_below))

    def summarise(self, config: Config, records: list[dict]) -> Summary:
        """The tables of sources and of the final norm's effect, for all tokens and for hard ones; see `ranks.summary`."""
        return ranks.summary(records)

    def figures(self, config: Config, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """`fig_layer_probe_ranks`: ranks by layer, for all tokens and for hard ones, on a logarithmic axis."""
        from matplotlib.figure import Figure

        if not summary.tables["layers"]:
            return {}
        parts = {"all": summary.tables["layers"]}
        if summary.values["num_hard"]:
            parts["hard"] = summary.tables["hard_layers"]
        titles = {"all": "All tokens", "hard": f"Tokens with p < {self.hard_below:g}"}
        figure = Figure(figsize=(5.6 * len(parts), 4.6), layout="constrained")
        panels = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
        for axes, (part, rows) in zip(panels, parts.items(), strict=True):
            _draw(axes, rows, summary.number("chance_rank"))
            n = next(row["n"] for row in rows if row["source"] == "target")
            axes.set(title=f"{titles[part]} (n = {n:,})", xlabel="decoder layer")
        panels[0].set_ylabel("rank of the next token (1 is best)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2 * len(parts))
        return {"fig_layer_probe_ranks": figure}


def _draw(axes: Axes, rows: list[dict], chance: float) -> None:
    """Mean and median by layer, raw and normed, with intervals; target, draft and chance as horizontal lines."""
    from dflash_mcmc.report.figure import GREEN, INK, OTHER, RIGHT, WRONG

    kinds = (("none", WRONG, "o", "raw", -0.12), ("final", RIGHT, "s", "after the final norm", 0.12))
    for norm, colour, marker, label, aside in kinds:
        layers = [row for row in rows if row["norm"] == norm]
        for name, style, fill in (("mean", "-", "full"), ("median", "--", "none")):
            found = [row[f"{name}_rank"] for row in layers]
            ends = [(row[f"{name}_rank_low"], row[f"{name}_rank_high"]) for row in layers]
            reach = [[rank - low for rank, (low, _) in zip(found, ends, strict=True)],
                     [high - rank for rank, (_, high) in zip(found, ends, strict=True)]] if None not in ends[0] else None
            axes.errorbar([row["layer"] + aside for row in layers], found, reach, color=colour, linestyle=style, marker=marker,
                          markersize=4.0, fillstyle=fill, linewidth=1.2, elinewidth=0.9, capsize=2.0, label=f"{name}, {label}")
    for source, colour, style, label in (("target", INK, "-", "mean, target"),
                                         ("draft", GREEN, "-.", "mean, draft (on its tokens)")):
        for row in rows:
            if row["source"] == source and row["mean_rank"] is not None:
                axes.axhline(row["mean_rank"], color=colour, linestyle=style, linewidth=1.1, label=label)
                if row["mean_rank_low"] is not None:
                    axes.axhspan(row["mean_rank_low"], row["mean_rank_high"], color=colour, alpha=0.12, linewidth=0)
    axes.axhline(chance, color=OTHER, linestyle=":", label="chance")
    places = [row["layer"] for row in layers]
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xticks(places[:: 1 + len(places) // 12])
