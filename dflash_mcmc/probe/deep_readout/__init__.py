"""Measures what a draft extracts from the target's features along an answer, as in the document `deep_readout_diagnostic`.

The document assumed that every block after the first sees only the features of one block, which is too little context. But the
cache of a DFlash draft keeps the features of all positions, so the draft has no such limit. The option `context` can impose
the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, final

from typing_extensions import TypedDict

from dflash_mcmc.chains import cost
from dflash_mcmc.draft import load_feature_drafter
from dflash_mcmc.fields import identity
from dflash_mcmc.forcing.answers import answers
from dflash_mcmc.probe import AnswerProbe, Summary, Unit, Work
from dflash_mcmc.probe.deep_readout import tables
from dflash_mcmc.registry import register
from dflash_mcmc.rng import Key
from dflash_mcmc.store.schema import Count, Long, Range
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.forcing.answers import Answer
    from dflash_mcmc.settings import Settings


class ParameterCounts(TypedDict):
    """Numbers of parameters of target and draft, and the sizes that the diagram needs, as JSON values."""

    target_layers: Count
    embedding: Count
    head: Count
    tied: bool
    """Whether the head has the weights of the embedding."""
    target_other: Count
    draft_fc: Count
    draft_layers: Count
    draft_norms: Count
    num_target_layers: Count
    num_draft_layers: Count
    tapped_layers: list[Count]
    hidden_size: Count
    words: Count
    """Number of tokens in the vocabulary."""


@final
class ReadoutRecord(TypedDict):
    """The compared tokens of an answer, in their order. A reader is `target` or a mode of the draft."""

    prompt_length: Count
    """Tokens of the prompt."""
    block_size: Annotated[int, Range(1)]
    """Tokens of a block, with its known first token."""
    block: Annotated[list[Count], Long("compared")]
    """The number of each token's block, from 0."""
    p: Annotated[dict[str, list[Annotated[float, Range(0)]]], Long("compared")]
    """Probability of each token at temperature 1, by reader."""
    rank: Annotated[dict[str, list[Annotated[int, Range(1)]]], Long("compared")]
    """1 + number of tokens with a strictly larger logit, by reader."""
    parameters: ParameterCounts
    """Parameters of target and draft, the same in all records."""


@register("probe", "deep_readout")
@dataclass(slots=True, kw_only=True)
class DeepReadout(AnswerProbe):
    """Probability and rank of an answer's tokens in target and draft.

    The draft is measured in several modes. It reads masks; the answer's own tokens; the answer's own tokens, with noise
    instead of the target's features; or masks, with the prompt's features re-injected. An answer is teacher-forced in whole
    blocks. Answers shorter than a block are skipped and counted.
    """

    context: Literal["full", "block", "prompt"] = identity(
        "full", "features before a block that the block sees: full = all, as in training; block = only those since the "
        "previous block (for the first block, the prompt's); prompt = only the prompt's")
    reinject_every: int | None = identity(None, "adds the mode reinject: masks, where every block whose number (from 0) is a "
                                          "positive multiple of this number sees the prompt's features once more; null leaves "
                                          "the mode out", ge=1)

    record_type = ReadoutRecord
    tables_in = f"{__name__}.tables"
    needs_draft = True

    def expected_cost(self, config: Settings) -> UnitCost:
        """The cost of drawing the answer, reading prompt and whole blocks once, and drafting each block in every mode."""
        answer = cost.forced(config)
        modes = len(tables.MODES) + (self.reinject_every is not None)
        return UnitCost(answer.drawing + answer.prompt + answer.blocks * answer.block_size, modes * answer.blocks)

    def measure(self, config: Settings, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Probabilities and ranks of each problem's tokens, and the parameters of target and draft.

        Raises UserError for an answer that does not fit into the model's positions.
        """
        from dflash_mcmc.probe.deep_readout.readout import count_parameters

        model = config.model.load(work.device)
        drafter = load_feature_drafter(config, model)
        counts, key = count_parameters(model, drafter.network), Key(config.seed).fold_in("deep_readout")
        for unit, answer in answers(config, model, work, self.answers):
            yield unit, self._record(drafter, answer, key.fold_in(unit.problem, "noise"), counts)

    def _record(self, drafter: DFlashDrafter, answer: Answer, key: Key, counts: ParameterCounts) -> dict:
        from dflash_mcmc.forcing.sequences import NotNumbers
        from dflash_mcmc.probe.deep_readout.readout import AnswerBlocks, hidden_states, read_out

        size = drafter.num_drafted + 1
        if reason := answer.skipped(least=size):
            return {"skipped": reason}
        blocks = AnswerBlocks.of(len(answer.prompt), len(answer.tokens), size)
        try:
            modes = tables.MODES if self.reinject_every is None else (*tables.MODES, tables.REINJECT)
            hidden = hidden_states(drafter, answer.sequence, blocks, self.context, key, modes, self.reinject_every)
            readout = read_out(drafter, hidden, modes)
        except NotNumbers as error:
            return {"skipped": str(error)}
        block_of = [index for index in range(len(blocks.anchors)) for _ in range(drafter.num_drafted)]
        return {"prompt_length": blocks.prompt_length, "block_size": size, "block": block_of, **readout._asdict(),
                "parameters": counts}

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """The document's tables; see `tables.summary`."""
        return tables.summary(config, records)

    def figures(self, config: Settings, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """The document's figures, named as in the document; none if there is no token to compare."""
        from dflash_mcmc.probe.deep_readout import figures

        measured = [record for record in records if "skipped" not in record]
        if not measured:
            return {}
        return {"fig_architecture": figures.architecture(measured[0]["parameters"]),
                "fig_bucket_rank_comparison": figures.buckets(summary.tables["confidence"]),
                "fig_signal_decomposition": figures.decomposition(summary.tables["decomposition"]),
                "fig_block_rank_decay": figures.by_block(summary.data["block_curves"], self.context),
                "fig_extended_context": figures.by_position(summary.data["position_curves"], self.context)}
