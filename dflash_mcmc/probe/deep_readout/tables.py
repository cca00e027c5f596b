"""The tables of the document `deep_readout_diagnostic`, sections 3.1 to 4.1 and 6, with intervals, from the records.

Ranks begin at 1, and tokens with equal logits share a rank. The draft or the target wins a token if it is strictly better.
Mean ranks are sensitive to outliers, so the tables also have medians or geometric means. A reader is `target`, or a mode of
the draft: `mask`, `gold`, `random`, `reinject`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from typing_extensions import TypedDict

from dflash_mcmc.probe import PROBLEMS, SKIPPED, Each, Observations, Table, measured
from dflash_mcmc.registry import name_of
from dflash_mcmc.statistics.intervals import IntervalEstimate
from dflash_mcmc.store.schema import Count

TARGET, MODES = "target", ("mask", "gold", "random")
REINJECT = "reinject"
"""The mode of section 6, which is measured only if the probe asks for it."""
PROMPT_AGAIN = "+ prompt's features again"
CONTEXTS = ("full", "block", "prompt")
"""The context that a block sees: all positions before it, only the positions since the previous block, or only the prompt."""
BUCKETS = (("< 0.01", 0.0, 0.01), ("0.01 - 0.1", 0.01, 0.1), ("0.1 - 0.5", 0.1, 0.5), ("0.5 - 0.9", 0.5, 0.9),
           (">= 0.9", 0.9, math.inf))
"""Ranges of the target's probability: name, lower end, upper end (exclusive)."""
_SINGLE_BLOCKS = 10
"""Number of first blocks that have one row each. Every later row covers twice as many blocks as the row before."""
_BINS_AN_OCTAVE = 2


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


def tokens_of(records: Sequence[dict], context: str, reinject_every: int | None = None) -> Observations:
    """The compared tokens of all records that have any, with the names `modes`, `readers` and `words`, the vocabulary's size.

    Columns by reader: `p_mask`, `rank_mask`, `log_mask` (the logarithm of the rank); for the reader `chance` the expectations
    in a random order. `position` is the number of positions before the token's block, `context` the number of those that the
    draft sees, and `again` is whether the block sees the prompt's features once more in the mode `reinject`.
    """
    modes = MODES if reinject_every is None else (*MODES, REINJECT)
    readers, kept = (TARGET, *modes), measured(records)
    words = kept[0]["parameters"]["words"] if kept else 1

    def joined(lists: list[list], dtype: type) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype), *(np.asarray(values, dtype) for values in lists)])

    block = joined([record["block"] for record in kept], np.int64)
    problem, prompt, size = (joined([[record[name]] * len(record["block"]) for record in kept], dtype) for name, dtype in (
        ("problem", object), ("prompt_length", np.int64), ("block_size", np.int64)))
    position = prompt + size * block
    columns = {
        "problem": problem, "block": block, "position": position,
        "context": {"full": position, "prompt": prompt, "block": np.where(block == 0, prompt, size)}[context],
        "again": (block > 0) & (block % (reinject_every or 1) == 0),
        "rank_chance": np.full(len(block), (words + 1) / 2.0),
        "log_chance": np.full(len(block), math.lgamma(words + 1) / words)}
    for reader in readers:
        columns[f"p_{reader}"], columns[f"rank_{reader}"] = (
            joined([record[part][reader] for record in kept], np.float64) for part in ("p", "rank"))
        columns[f"log_{reader}"] = np.log(columns[f"rank_{reader}"])
    return Observations(columns, modes=modes, readers=readers)


def _geometric(of: Observations, before: str, after: str) -> IntervalEstimate:
    """The geometric mean rank before a signal is added, divided by the one with it."""
    return of.mean(of.values[f"log_{before}"] - of.values[f"log_{after}"]).mapped(math.exp)


_MODE = ("mode", "how the draft reads the block: `mask` (as in drafting), `gold` (with all gold tokens of the block), "
                 "`random` (with noise instead of the target's features), `reinject` (with the prompt's features again)")
_RANK = "of a gold token among all tokens by logit, from 1 (best)"
_N = ("n", "tokens of the row", lambda of: of.n)
_OF_MODE = (
    ("rank_draft_wins", "share of tokens with a strictly better rank under the draft than under the target",
     lambda of: of.mean(of.values[f"rank_{of['mode']}"] < of.values["rank_target"])),
    ("p_draft_wins", "share of tokens with a strictly higher probability under the draft than under the target",
     lambda of: of.mean(of.values[f"p_{of['mode']}"] > of.values["p_target"])),
    _N,
)
_RANKS = (
    ("mean_rank_target", f"mean rank {_RANK}, under the target", lambda of: of.mean("rank_target")),
    ("mean_rank_draft", "mean rank under the draft", lambda of: of.mean(f"rank_{of['mode']}")),
)

OVERALL = Table("overall", (  # section 3.1
    _MODE,
    ("mean_p_target", "mean probability of the gold tokens under the target", lambda of: of.mean("p_target")),
    ("mean_p_draft", "mean probability of the gold tokens under the draft", lambda of: of.mean(f"p_{of['mode']}")),
    *_RANKS,
    ("median_rank_target", "median rank under the target", lambda of: of.quantiles("rank_target", [0.5])[0]),
    ("median_rank_draft", "median rank under the draft", lambda of: of.quantiles(f"rank_{of['mode']}", [0.5])[0]),
    *_OF_MODE,
))
CONFIDENCE = Table("confidence", (  # section 3.2
    ("p_target", "range of the target's probability of the token"), _MODE, *_RANKS, *_OF_MODE))
DECOMPOSITION = Table("decomposition", (  # section 3.3
    ("tokens", "`all`, or the tokens that the target gives a probability below 0.01"),
    ("component", "source of signal that is added"),
    ("computation", "modes that are compared: before -> after",
     lambda of: "-" if of["before"] == of["after"] else f"{of['before']} -> {of['after']}"),
    ("mean_rank", "mean rank with the added signal", lambda of: of.mean(f"rank_{of['after']}")),
    ("factor", "mean rank before divided by mean rank after; above 1 the signal helps",
     lambda of: of.ratio(f"rank_{of['before']}", f"rank_{of['after']}")),
    ("factor_of_geometric_means", "the same for geometric means of ranks, which outliers move less",
     lambda of: _geometric(of, of["before"], of["after"])),
    _N,
))
BLOCKS = Table("blocks", (  # section 3.4
    ("block", "number of the block in the answer, from 0, or a range of numbers",
     lambda of: str(of["first"]) if of["end"] == of["first"] + 1 else f"{of['first']} - {of['end'] - 1}"),
    ("context_positions", "mean number of positions before the block that the draft sees", lambda of: of.mean("context")),
    Each(lambda of: of["readers"], [
        ("rank_{reader}", "mean rank for this reader", lambda of, reader: of.mean(f"rank_{reader}"))]),
    _N,
))
# `factor` is 1, up to rounding, for the blocks that do not see the features again: they are the same in both modes.
REINJECTION = Table("reinjection", (  # section 6
    ("blocks", "whether the blocks of the row see the prompt's features again"),
    Each(lambda of: (TARGET, "mask", REINJECT), [
        ("mean_rank_{reader}", "mean rank for this reader", lambda of, reader: of.mean(f"rank_{reader}"))]),
    ("factor", "mean rank in the mode `mask` divided by that in the mode `reinject`",
     lambda of: of.ratio("rank_mask", "rank_reinject")),
    ("factor_of_geometric_means", "the same for geometric means of ranks", lambda of: _geometric(of, "mask", REINJECT)),
    ("rank_improved", "share of tokens with a better rank in the mode `reinject`",
     lambda of: of.mean(of.values["rank_reinject"] < of.values["rank_mask"])),
    ("rank_worsened", "share of tokens with a worse rank in the mode `reinject`",
     lambda of: of.mean(of.values["rank_reinject"] > of.values["rank_mask"])),
    _N,
))
_CURVE = (
    ("reader", "`target`, or a mode of the draft"),
    ("mean_rank", f"mean rank {_RANK}", lambda of: of.mean(f"rank_{of['reader']}")),
    ("geometric_mean_rank", "geometric mean of these ranks", lambda of: of.mean(f"log_{of['reader']}").mapped(math.exp)),
    ("mean_p", "mean probability of the gold tokens", lambda of: of.mean(f"p_{of['reader']}")),
    _N,
)
BLOCK_CURVES = Table("block_curves", (
    ("first_block", "first block of the group, from 0", lambda of: of["first"]),
    ("last_block", "last block of the group", lambda of: of["end"] - 1),
    *_CURVE,
))
POSITION_CURVES = Table("position_curves", (
    ("from", "smallest number of positions before the block in this bin"),
    ("to_below", "end of the bin, exclusive"),
    *_CURVE,
))


def rows(tokens: Observations) -> dict[str, list[dict]]:
    """The rows of the tables that are computed from the tokens, and of both curves."""
    p, block, modes = tokens.values["p_target"], tokens.values["block"], tokens["modes"]
    again = [(PROMPT_AGAIN, "mask", REINJECT)] if REINJECT in modes else []
    # As in the document for the tokens that the target finds least likely, and for all.
    signals = (("random baseline", "random", "random"), ("+ features", "random", "mask"), ("+ gold tokens", "mask", "gold"),
               ("features and gold tokens", "random", "gold"), *again, (TARGET, "random", TARGET),
               ("chance", "random", "chance"))
    groups = [tokens.row(p < BUCKETS[0][2], tokens=f"p_target {BUCKETS[0][0]}"), tokens.row(tokens="all")]
    buckets = [tokens.row((p >= least) & (p < end), p_target=name) for name, least, end in BUCKETS]
    blocks, first = [], 0
    while first <= block.max(initial=-1):
        end = first + 1 if first < _SINGLE_BLOCKS else 2 * first
        blocks.append(tokens.row((block >= first) & (block < end), first=first, end=end))
        first = end
    # Bins of positions have equal width on a logarithmic axis.
    bins, places = np.floor(_BINS_AN_OCTAVE * np.log2(tokens.values["position"])).astype(int), []
    for index in np.unique(bins):
        low, high = (math.ceil(2.0 ** (at / _BINS_AN_OCTAVE)) for at in (index, index + 1))
        places.append(tokens.row(bins == index, **{"from": low, "to_below": high}))
    seen = tokens.values["again"]
    return {
        "overall": OVERALL.rows(tokens.row(mode=mode) for mode in modes),
        "confidence": CONFIDENCE.rows(bucket.row(mode=mode) for bucket in buckets for mode in modes),
        "decomposition": DECOMPOSITION.rows(group.row(component=component, before=before, after=after)
                                            for group in groups for component, before, after in signals),
        "blocks": BLOCKS.rows(blocks),
        "reinjection": REINJECTION.rows([tokens.row(seen, blocks="with the prompt's features"),
                                         tokens.row(~seen, blocks="without")] if again else []),
        "block_curves": BLOCK_CURVES.rows(each.row(reader=reader) for each in blocks for reader in tokens["readers"]),
        "position_curves": POSITION_CURVES.rows(each.row(reader=reader) for each in places for reader in tokens["readers"]),
    }


def _factors(signals: list[dict], everything: bool) -> dict[str, float]:
    """The factor of each signal that was measured, over all tokens or over those of low confidence."""
    names = {"+ features": "features", "+ gold tokens": "gold", PROMPT_AGAIN: "reinject", TARGET: "target"}
    factors = {row["component"]: row["factor"] for row in signals if (row["tokens"] == "all") == everything}
    return {name: factors[component] for component, name in names.items() if component in factors}


VALUES = Table("values", (  # of the tokens, with all `records` and the table `decomposition`
    PROBLEMS, SKIPPED,
    ("num_tokens", "compared tokens", lambda of: of.n),
    ("num_low_confidence_tokens", "tokens that the target gives a probability below 0.01",
     lambda of: next(row["n"] for row in of["decomposition"] if row["tokens"] != "all")),
    Each(lambda of: of["readers"], [("mean_rank_{reader}", "mean rank of all compared tokens for this reader",
                                     lambda of, reader: of.mean(f"rank_{reader}").value)]),
    Each(lambda of: of["readers"], [("mean_p_{reader}", "mean probability of all compared tokens for this reader",
                                     lambda of, reader: of.mean(f"p_{reader}").value)]),
    Each(lambda of: _factors(of["decomposition"], True), [
        ("{signal}_factor", "`factor` of the signal in `decomposition` (features, gold, reinject, target), over all tokens",
         lambda of, factor: factor)]),
    Each(lambda of: _factors(of["decomposition"], False), [
        ("{signal}_factor_low_confidence", "the same over the tokens that the target gives a probability below 0.01",
         lambda of, factor: factor)]),
))


PARAMETERS = Table("parameters", (  # section 4.1
    ("component", "part of target or draft"),
    ("parameters", "number of its parameters"),
    ("of_target_layers", "this number divided by that of the target's layers", lambda of: of["parameters"] / of["layers"]),
    ("role", "what the part does"),
))


def parameter_rows(counts: ParameterCounts) -> list[dict]:
    """A row for each part of target and draft."""
    taps, hidden, tied = len(counts["tapped_layers"]), counts["hidden_size"], counts["tied"]
    return PARAMETERS.rows({"component": name, "parameters": size, "role": role, "layers": counts["target_layers"]}
                           for name, size, role in (
        (f"target: {counts['num_target_layers']} layers", counts["target_layers"], "deep processing"),
        ("target: embedding", counts["embedding"], "shared with the draft"),
        ("target: head", counts["head"], "shared with the draft" + (", same weights as the embedding" if tied else "")),
        ("target: other", counts["target_other"], "final norm, and positions if they are learned"),
        (f"draft: fc ({taps * hidden} to {hidden})", counts["draft_fc"], f"linear, {taps} to 1"),
        (f"draft: {counts['num_draft_layers']} layers", counts["draft_layers"], "read the features"),
        ("draft: norms", counts["draft_norms"], "after fc and at the end"),
    ))


CONFIGURATION = Table("configuration", (  # of a run with at least one measured answer, from its ParameterCounts and more
    ("dataset", "name of the dataset", lambda of: name_of(of["config"].dataset)),
    ("answers", "`probe.answers`", lambda of: of["config"].probe.answers),
    ("context", "`probe.context`", lambda of: of["config"].probe.context),
    ("reinject_every", "`probe.reinject_every`", lambda of: of["config"].probe.reinject_every),
    ("seed", "`seed`", lambda of: of["config"].seed),
    ("target_parameters", "parameters of the target; a head that is the embedding counts once",
     lambda of: of["target_layers"] + of["embedding"] + of["target_other"] + (0 if of["tied"] else of["head"])),
    ("draft_parameters", "parameters of the draft without the target's embedding and head",
     lambda of: of["draft_fc"] + of["draft_layers"] + of["draft_norms"]),
    ("hidden_size", "width of both"),
    ("target_layers", "layers of the target", lambda of: of["num_target_layers"]),
    ("draft_layers", "layers of the draft", lambda of: of["num_draft_layers"]),
    ("reads_layers", "layers of the target that the draft reads, from 0",
     lambda of: ", ".join(map(str, of["tapped_layers"]))),
    ("block_size", "tokens of a block, with the known one", lambda of: of["kept"][0]["block_size"]),
    ("problems", "measured answers", lambda of: len(of["kept"])),
    ("skipped", "answers that were left out", lambda of: len(of["records"]) - len(of["kept"])),
    ("blocks", "measured blocks", lambda of: sum(max(record["block"]) + 1 for record in of["kept"])),
    ("tokens", "compared tokens", lambda of: sum(len(record["block"]) for record in of["kept"])),
))

ALL = (VALUES, OVERALL, CONFIDENCE, DECOMPOSITION, BLOCKS, REINJECTION, PARAMETERS, CONFIGURATION, BLOCK_CURVES,
       POSITION_CURVES)
