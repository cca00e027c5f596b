"""Measures what a draft extracts from the target's features along an answer, as in the document `deep_readout_diagnostic`.

The document assumed that every block after the first sees only the features of one block. But the cache of a DFlash draft
keeps those of all positions. The option `context` can impose the limit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dflash_mcmc.chains import cost
from dflash_mcmc.components import Settings, identity, register
from dflash_mcmc.forcing.answers import Answer
from dflash_mcmc.probe import AnswerProbe, Summary, Unit, Work, measured
from dflash_mcmc.probe.deep_readout import tables
from dflash_mcmc.rng import Key
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter


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

    tables_in = f"{__name__}.tables"
    needs_draft = True
    is_timed = False

    def expected_cost(self, config: Settings) -> UnitCost:
        """The cost of drawing the answer, reading prompt and whole blocks once, and drafting each block in every mode."""
        answer = cost.forced(config)
        modes = len(tables.MODES) + (self.reinject_every is not None)
        return UnitCost(answer.drawing + answer.prompt + answer.blocks * answer.block_size, modes * answer.blocks)

    def recorder(self, config: Settings, model: "LanguageModel", draft: "DFlashDrafter | None",
                 work: Work) -> Callable[[Unit, Answer], dict]:
        """Number of the block, probability and rank of each compared token, by reader, and the parameters of the pair."""
        from dflash_mcmc.probe.deep_readout.readout import count_parameters, hidden_states, read_out

        assert draft is not None  # `needs_draft`
        counts, key = count_parameters(model, draft.network), Key(config.seed).fold_in("deep_readout")
        modes = tables.MODES if self.reinject_every is None else (*tables.MODES, tables.REINJECT)

        def record(unit: Unit, answer: Answer) -> dict:
            hidden = hidden_states(draft, answer.prompt, answer.tokens, self.context, key.fold_in(unit.problem, "noise"),
                                   modes, self.reinject_every)
            count, n = hidden.tokens.shape
            return {"prompt_length": len(answer.prompt), "block_size": n + 1,
                    "block": [index for index in range(count) for _ in range(n)], **read_out(draft, hidden, modes),
                    "parameters": counts}

        return record

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """The document's tables: overall, by the target's confidence, decomposed, by block, re-injection, and parameters.

        Intervals are clustered by problem. `factor` is the factor by which a signal lowers the mean rank.
        """
        tokens, kept = tables.tokens_of(records, self.context, self.reinject_every), measured(records)
        found = tables.rows(tokens)
        data = {name: found.pop(name) for name in ("block_curves", "position_curves")}
        again, found["parameters"] = found.pop("reinjection"), []
        if again:
            found["reinjection"] = again
        if kept:
            found["parameters"] = tables.parameter_rows(kept[0]["parameters"])  # the same in all records
        values = tables.VALUES.row(tokens.row(records=records, decomposition=found["decomposition"]))
        return Summary(values, found, data)

    def figures(self, config: Settings, records: list[dict], summary: Summary) -> "dict[str, Figure]":
        """The document's figures, named as in the document; none if there is no token to compare."""
        if not (kept := measured(records)):
            return {}
        return {"fig_architecture": tables.architecture(kept[0]["parameters"]),
                "fig_bucket_rank_comparison": tables.buckets(summary.tables["confidence"]),
                "fig_signal_decomposition": tables.decomposition(summary.tables["decomposition"]),
                "fig_block_rank_decay": tables.by_block(summary.data["block_curves"], self.context),
                "fig_extended_context": tables.by_position(summary.data["position_curves"], self.context)}
