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

from dflash_mcmc.probe.columns import PROBLEMS, SKIPPED, Each, Table
from dflash_mcmc.registry import name_of
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate
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


class Tokens:
    """The compared tokens of all records that have any.

    Attributes:
        problem: the problem of each token. The arrays below also have one value per token.
        block: number of the token's block.
        position: number of positions before the block.
        context: number of those positions that the draft sees.
        p, rank: probabilities and ranks by reader.
        words: number of tokens in the vocabulary; None without records.
        modes: the measured modes of the draft.
        readers: the target and the modes.
        reinjected: whether the token's block sees the prompt's features once more in the mode `reinject`.
    """

    def __init__(self, records: Sequence[dict], context: str, reinject_every: int | None = None):
        self.modes = MODES if reinject_every is None else (*MODES, REINJECT)
        self.readers = (TARGET, *self.modes)
        kept = [record for record in records if "skipped" not in record]
        counts = [len(record["block"]) for record in kept]
        self.problem = [record["problem"] for record, count in zip(kept, counts, strict=True) for _ in range(count)]
        self.block = _joined([record["block"] for record in kept], np.int64)
        prompt, size = (np.repeat([record[name] for record in kept], counts).astype(np.int64)
                        for name in ("prompt_length", "block_size"))
        self.position = prompt + size * self.block
        self.context = {"full": self.position, "prompt": prompt, "block": np.where(self.block == 0, prompt, size)}[context]
        self.reinjected = (self.block > 0) & (self.block % (reinject_every or 1) == 0)
        self.p = {name: _joined([record["p"][name] for record in kept], np.float64) for name in self.readers}
        self.rank = {name: _joined([record["rank"][name] for record in kept], np.float64) for name in self.readers}
        self.words = kept[0]["parameters"]["words"] if kept else None
        self.clusters = Clusters(self.problem)

    def __len__(self) -> int:
        return len(self.problem)

    @property
    def all(self) -> np.ndarray:
        """All tokens, as a selection."""
        return np.ones(len(self), bool)

    def mean(self, values: np.ndarray, among: np.ndarray | None = None) -> IntervalEstimate:
        """Mean over the tokens that `among` selects."""
        return self.clusters.mean(values, among)

    def mean_rank(self, reader: str, among: np.ndarray) -> IntervalEstimate:
        """Mean rank for a reader."""
        return self.mean(self.rank[reader], among)

    def factor(self, among: np.ndarray, before: str, after: str) -> IntervalEstimate:
        """The mean rank before a signal is added, divided by the mean rank with it."""
        above, below = (np.where(among, ranks, 0.0) for ranks in (self.rank[before], self.reached(after)[0]))
        return self.clusters.ratio(above, below)

    def factor_of_geometric_means(self, among: np.ndarray, before: str, after: str) -> IntervalEstimate:
        """The same for geometric means."""
        return self.mean(np.log(self.rank[before]) - self.reached(after)[1], among).mapped(math.exp)

    def reached(self, reader: str) -> tuple[np.ndarray, np.ndarray]:
        """The ranks for a reader, and their logarithms. For `chance`: the expectations of a rank in a random order."""
        words = self.words or 1
        if reader == "chance":
            return np.full(len(self), (words + 1) / 2.0), np.full(len(self), math.lgamma(words + 1) / words)
        return self.rank[reader], np.log(self.rank[reader])


# A row is about some of the tokens, `among`, bool (tokens,), and mostly about a mode of the draft, or a reader.
_MODE = ("mode", "how the draft reads the block: `mask` (as in drafting), `gold` (with all gold tokens of the block), "
                 "`random` (with noise instead of the target's features), `reinject` (with the prompt's features again)",
         lambda tokens, among, mode, *_: mode)
_RANK = "of a gold token among all tokens by logit, from 1 (best)"
_N = ("n", "tokens of the row", lambda tokens, among, *_: int(among.sum()))
_WINS = (
    ("rank_draft_wins", "share of tokens with a strictly better rank under the draft than under the target",
     lambda tokens, among, mode, *_: tokens.mean(tokens.rank[mode] < tokens.rank[TARGET], among)),
    ("p_draft_wins", "share of tokens with a strictly higher probability under the draft than under the target",
     lambda tokens, among, mode, *_: tokens.mean(tokens.p[mode] > tokens.p[TARGET], among)),
)

OVERALL = Table("overall", (  # section 3.1
    _MODE,
    ("mean_p_target", "mean probability of the gold tokens under the target",
     lambda tokens, among, _: tokens.mean(tokens.p[TARGET], among)),
    ("mean_p_draft", "mean probability of the gold tokens under the draft",
     lambda tokens, among, mode: tokens.mean(tokens.p[mode], among)),
    ("mean_rank_target", f"mean rank {_RANK}, under the target", lambda tokens, among, _: tokens.mean_rank(TARGET, among)),
    ("mean_rank_draft", "mean rank under the draft", lambda tokens, among, mode: tokens.mean_rank(mode, among)),
    ("median_rank_target", "median rank under the target",
     lambda tokens, *_: tokens.clusters.quantiles(tokens.rank[TARGET], [0.5])[0]),
    ("median_rank_draft", "median rank under the draft",
     lambda tokens, _, mode: tokens.clusters.quantiles(tokens.rank[mode], [0.5])[0]),
    *_WINS, _N,
))
CONFIDENCE = Table("confidence", (  # section 3.2
    ("p_target", "range of the target's probability of the token", lambda tokens, among, mode, name: name),
    _MODE,
    ("mean_rank_target", "mean rank under the target", lambda tokens, among, *_: tokens.mean_rank(TARGET, among)),
    ("mean_rank_draft", "mean rank under the draft", lambda tokens, among, mode, _: tokens.mean_rank(mode, among)),
    *_WINS, _N,
))
DECOMPOSITION = Table("decomposition", (  # section 3.3
    ("tokens", "`all`, or the tokens that the target gives a probability below 0.01",
     lambda tokens, among, name, *_: name),
    ("component", "source of signal that is added", lambda tokens, among, name, component, *_: component),
    ("computation", "modes that are compared: before -> after",
     lambda tokens, among, name, component, before, after: "-" if before == after else f"{before} -> {after}"),
    ("mean_rank", "mean rank with the added signal",
     lambda tokens, among, name, component, before, after: tokens.mean(tokens.reached(after)[0], among)),
    ("factor", "mean rank before divided by mean rank after; above 1 the signal helps",
     lambda tokens, among, name, component, *modes: tokens.factor(among, *modes)),
    ("factor_of_geometric_means", "the same for geometric means of ranks, which outliers move less",
     lambda tokens, among, name, component, *modes: tokens.factor_of_geometric_means(among, *modes)),
    _N,
))
BLOCKS = Table("blocks", (  # section 3.4
    ("block", "number of the block in the answer, from 0, or a range of numbers",
     lambda tokens, among, first, end: str(first) if end == first + 1 else f"{first} - {end - 1}"),
    ("context_positions", "mean number of positions before the block that the draft sees",
     lambda tokens, among, *_: tokens.mean(tokens.context, among)),
    Each(lambda tokens, *_: {reader: reader for reader in tokens.readers}, [
        ("rank_{reader}", "mean rank for this reader",
         lambda tokens, among, first, end, reader: tokens.mean_rank(reader, among))]),
    _N,
))
# `factor` is 1, up to rounding, for the blocks that do not see the features again: they are the same in both modes.
REINJECTION = Table("reinjection", (  # section 6
    ("blocks", "whether the blocks of the row see the prompt's features again", lambda tokens, among, name: name),
    Each(lambda *_: {reader: reader for reader in (TARGET, "mask", REINJECT)},
         [("mean_rank_{reader}", "mean rank for this reader",
           lambda tokens, among, name, reader: tokens.mean_rank(reader, among))]),
    ("factor", "mean rank in the mode `mask` divided by that in the mode `reinject`",
     lambda tokens, among, _: tokens.factor(among, "mask", REINJECT)),
    ("factor_of_geometric_means", "the same for geometric means of ranks",
     lambda tokens, among, _: tokens.factor_of_geometric_means(among, "mask", REINJECT)),
    ("rank_improved", "share of tokens with a better rank in the mode `reinject`",
     lambda tokens, among, _: tokens.mean(tokens.rank[REINJECT] < tokens.rank["mask"], among)),
    ("rank_worsened", "share of tokens with a worse rank in the mode `reinject`",
     lambda tokens, among, _: tokens.mean(tokens.rank[REINJECT] > tokens.rank["mask"], among)),
    _N,
))
_CURVE = (
    ("reader", "`target`, or a mode of the draft", lambda tokens, among, reader, *_: reader),
    ("mean_rank", f"mean rank {_RANK}", lambda tokens, among, reader, *_: tokens.mean_rank(reader, among)),
    ("geometric_mean_rank", "geometric mean of these ranks",
     lambda tokens, among, reader, *_: tokens.mean(np.log(tokens.rank[reader]), among).mapped(math.exp)),
    ("mean_p", "mean probability of the gold tokens",
     lambda tokens, among, reader, *_: tokens.mean(tokens.p[reader], among)),
    _N,
)
BLOCK_CURVES = Table("block_curves", (
    ("first_block", "first block of the group, from 0", lambda tokens, among, reader, first, end: first),
    ("last_block", "last block of the group", lambda tokens, among, reader, first, end: end - 1),
    *_CURVE,
))
POSITION_CURVES = Table("position_curves", (
    ("from", "smallest number of positions before the block in this bin", lambda tokens, among, reader, first, end: first),
    ("to_below", "end of the bin, exclusive", lambda tokens, among, reader, first, end: end),
    *_CURVE,
))


def rows(tokens: Tokens) -> dict[str, list[dict]]:
    """The rows of the tables that are computed from the tokens, and of both curves."""
    low, modes, readers = tokens.p[TARGET] < BUCKETS[0][2], tokens.modes, tokens.readers
    again = [(PROMPT_AGAIN, "mask", REINJECT)] if REINJECT in modes else []
    # As in the document for the tokens that the target finds least likely, and for all.
    signals = (("random baseline", "random", "random"), ("+ features", "random", "mask"), ("+ gold tokens", "mask", "gold"),
               ("features and gold tokens", "random", "gold"), *again, (TARGET, "random", TARGET),
               ("chance", "random", "chance"))
    buckets = [(name, (tokens.p[TARGET] >= least) & (tokens.p[TARGET] < end)) for name, least, end in BUCKETS]
    blocks, first = [], 0
    while first <= tokens.block.max(initial=-1):
        end = first + 1 if first < _SINGLE_BLOCKS else 2 * first
        blocks.append(((tokens.block >= first) & (tokens.block < end), first, end))
        first = end
    # Bins of positions have equal width on a logarithmic axis.
    bins = np.floor(_BINS_AN_OCTAVE * np.log2(tokens.position)).astype(int)
    ends = {index: [math.ceil(2.0 ** (at / _BINS_AN_OCTAVE)) for at in (index, index + 1)] for index in np.unique(bins)}
    return {
        "overall": OVERALL.rows((tokens, tokens.all, mode) for mode in modes),
        "confidence": CONFIDENCE.rows((tokens, among, mode, name) for name, among in buckets for mode in modes),
        "decomposition": DECOMPOSITION.rows(
            (tokens, among, name, *signal) for among, name in ((low, f"p_target {BUCKETS[0][0]}"), (tokens.all, "all"))
            for signal in signals),
        "blocks": BLOCKS.rows((tokens, *block) for block in blocks),
        "reinjection": REINJECTION.rows((tokens, among, name) for among, name in (
            (tokens.reinjected, "with the prompt's features"), (~tokens.reinjected, "without")) if again),
        "block_curves": BLOCK_CURVES.rows((tokens, among, reader, *ends) for among, *ends in blocks for reader in readers),
        "position_curves": POSITION_CURVES.rows((tokens, bins == index, reader, *ends[index]) for index in ends
                                                for reader in readers),
    }


def _factors(signals: list[dict], everything: bool) -> dict[str, float]:
    """The factor of each signal that was measured, over all tokens or over those of low confidence."""
    names = {"+ features": "features", "+ gold tokens": "gold", PROMPT_AGAIN: "reinject", TARGET: "target"}
    factors = {row["component"]: row["factor"] for row in signals if (row["tokens"] == "all") == everything}
    return {name: factors[component] for component, name in names.items() if component in factors}


VALUES = Table("values", (
    PROBLEMS, SKIPPED,
    ("num_tokens", "compared tokens", lambda _, tokens, signals: len(tokens)),
    ("num_low_confidence_tokens", "tokens that the target gives a probability below 0.01",
     lambda _, tokens, signals: next(row["n"] for row in signals if row["tokens"] != "all")),
    Each(lambda _, tokens, signals: {reader: reader for reader in tokens.readers}, [
        ("mean_rank_{reader}", "mean rank of all compared tokens for this reader",
         lambda _, tokens, signals, reader: tokens.mean(tokens.rank[reader]).value)]),
    Each(lambda _, tokens, signals: {reader: reader for reader in tokens.readers}, [
        ("mean_p_{reader}", "mean probability of all compared tokens for this reader",
         lambda _, tokens, signals, reader: tokens.mean(tokens.p[reader]).value)]),
    Each(lambda _, tokens, signals: _factors(signals, True), [
        ("{signal}_factor", "`factor` of the signal in `decomposition` (features, gold, reinject, target), over all tokens",
         lambda *case: case[-1])]),
    Each(lambda _, tokens, signals: _factors(signals, False), [
        ("{signal}_factor_low_confidence", "the same over the tokens that the target gives a probability below 0.01",
         lambda *case: case[-1])]),
))


PARAMETERS = Table("parameters", (  # section 4.1
    ("component", "part of target or draft", lambda counts, name, *_: name),
    ("parameters", "number of its parameters", lambda counts, name, parameters, role: parameters),
    ("of_target_layers", "this number divided by that of the target's layers",
     lambda counts, name, parameters, role: parameters / counts["target_layers"]),
    ("role", "what the part does", lambda *case: case[-1]),
))


def parameter_rows(counts: ParameterCounts) -> list[dict]:
    """A row for each part of target and draft."""
    taps, hidden, tied = len(counts["tapped_layers"]), counts["hidden_size"], counts["tied"]
    return PARAMETERS.rows((counts, *part) for part in (
        (f"target: {counts['num_target_layers']} layers", counts["target_layers"], "deep processing"),
        ("target: embedding", counts["embedding"], "shared with the draft"),
        ("target: head", counts["head"], "shared with the draft" + (", same weights as the embedding" if tied else "")),
        ("target: other", counts["target_other"], "final norm, and positions if they are learned"),
        (f"draft: fc ({taps * hidden} to {hidden})", counts["draft_fc"], f"linear, {taps} to 1"),
        (f"draft: {counts['num_draft_layers']} layers", counts["draft_layers"], "read the features"),
        ("draft: norms", counts["draft_norms"], "after fc and at the end"),
    ))


CONFIGURATION = Table("configuration", (  # of a run with at least one measured answer
    ("dataset", "name of the dataset", lambda config, *_: name_of(config.dataset)),
    ("answers", "`probe.answers`", lambda config, *_: config.probe.answers),
    ("context", "`probe.context`", lambda config, *_: config.probe.context),
    ("reinject_every", "`probe.reinject_every`", lambda config, *_: config.probe.reinject_every),
    ("seed", "`seed`", lambda config, *_: config.seed),
    ("target_parameters", "parameters of the target; a head that is the embedding counts once",
     lambda _, counts, *__: counts["target_layers"] + counts["embedding"] + counts["target_other"]
     + (0 if counts["tied"] else counts["head"])),
    ("draft_parameters", "parameters of the draft without the target's embedding and head",
     lambda _, counts, *__: counts["draft_fc"] + counts["draft_layers"] + counts["draft_norms"]),
    ("hidden_size", "width of both", lambda _, counts, *__: counts["hidden_size"]),
    ("target_layers", "layers of the target", lambda _, counts, *__: counts["num_target_layers"]),
    ("draft_layers", "layers of the draft", lambda _, counts, *__: counts["num_draft_layers"]),
    ("reads_layers", "layers of the target that the draft reads, from 0",
     lambda _, counts, *__: ", ".join(map(str, counts["tapped_layers"]))),
    ("block_size", "tokens of a block, with the known one", lambda *case: case[-1][0]["block_size"]),
    ("problems", "measured answers", lambda *case: len(case[-1])),
    ("skipped", "answers that were left out", lambda config, counts, records, kept: len(records) - len(kept)),
    ("blocks", "measured blocks", lambda *case: sum(max(record["block"]) + 1 for record in case[-1])),
    ("tokens", "compared tokens", lambda *case: sum(len(record["block"]) for record in case[-1])),
))

ALL = (VALUES, OVERALL, CONFIDENCE, DECOMPOSITION, BLOCKS, REINJECTION, PARAMETERS, CONFIGURATION, BLOCK_CURVES,
       POSITION_CURVES)


def _joined(lists: list[list], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(values, dtype) for values in lists]) if lists else np.empty(0, dtype)
