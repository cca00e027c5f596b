"""The tables of the document `deep_readout_diagnostic`, sections 3.1 to 4.1 and 6, with intervals, from the records.

Ranks begin at 1, and tokens with equal logits share a rank. The draft or the target wins a token if it is strictly better.
Mean ranks are sensitive to outliers, so the tables also have medians or geometric means. A reader is `target`, or a mode of
the draft: `mask`, `gold`, `random`, `reinject`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import TypedDict

from dflash_mcmc.probe.columns import PROBLEMS, SKIPPED, Each, Table, skipped
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate
from dflash_mcmc.store.schema import Count

if TYPE_CHECKING:
    import torch

    from dflash_mcmc.draft.network.dflash import DFlash
    from dflash_mcmc.engine.batching.language_model import LanguageModel

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


class Tokens:
    """The compared tokens of all records that have any.

    Attributes:
        records: all records.
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
        self.records = records
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

    def geometric_mean(self, logarithms: np.ndarray, among: np.ndarray) -> IntervalEstimate:
        """The exponential of the mean over the tokens that `among` selects."""
        return self.mean(logarithms, among).mapped(math.exp)

    def median_rank(self, reader: str) -> IntervalEstimate:
        """The median rank for a reader."""
        return self.clusters.quantiles(self.rank[reader], [0.5])[0]


class TokenSubset(NamedTuple):
    """Some of the tokens, and what the row about them is named by."""

    tokens: Tokens
    among: np.ndarray
    """bool (tokens,)."""
    name: str = ""
    mode: str = ""
    """The mode of the draft that is compared with the target, or a reader."""
    first: int = 0
    end: int = 0
    """A range of blocks or positions."""

    @property
    def n(self) -> int:
        """Number of the tokens."""
        return int(self.among.sum())

    def rank(self, reader: str) -> IntervalEstimate:
        """Mean rank for a reader."""
        return self.tokens.mean(self.tokens.rank[reader], self.among)

    def share(self, selected: np.ndarray) -> IntervalEstimate:
        """Share of the tokens that are selected, too."""
        return self.tokens.mean(selected, self.among)


_MODE = ("mode", "how the draft reads the block: `mask` (as in drafting), `gold` (with all gold tokens of the block), "
                 "`random` (with noise instead of the target's features), `reinject` (with the prompt's features again)",
         lambda part: part.mode)
_RANK = "of a gold token among all tokens by logit, from 1 (best)"
_N = ("n", "tokens of the row", lambda part: part.n)
_WINS = (
    ("rank_draft_wins", "share of tokens with a strictly better rank under the draft than under the target",
     lambda part: part.share(part.tokens.rank[part.mode] < part.tokens.rank[TARGET])),
    ("p_draft_wins", "share of tokens with a strictly higher probability under the draft than under the target",
     lambda part: part.share(part.tokens.p[part.mode] > part.tokens.p[TARGET])),
)

OVERALL = Table("overall", (  # section 3.1
    _MODE,
    ("mean_p_target", "mean probability of the gold tokens under the target", lambda part: part.share(part.tokens.p[TARGET])),
    ("mean_p_draft", "mean probability of the gold tokens under the draft", lambda part: part.share(part.tokens.p[part.mode])),
    ("mean_rank_target", f"mean rank {_RANK}, under the target", lambda part: part.rank(TARGET)),
    ("mean_rank_draft", "mean rank under the draft", lambda part: part.rank(part.mode)),
    ("median_rank_target", "median rank under the target", lambda part: part.tokens.median_rank(TARGET)),
    ("median_rank_draft", "median rank under the draft", lambda part: part.tokens.median_rank(part.mode)),
    *_WINS, _N,
))

CONFIDENCE = Table("confidence", (  # section 3.2
    ("p_target", "range of the target's probability of the token", lambda part: part.name),
    _MODE,
    ("mean_rank_target", "mean rank under the target", lambda part: part.rank(TARGET)),
    ("mean_rank_draft", "mean rank under the draft", lambda part: part.rank(part.mode)),
    *_WINS, _N,
))


class SignalSource(NamedTuple):
    """A source of signal: the tokens, and the readers before and after it is added."""

    part: TokenSubset
    component: str
    before: str
    after: str

    def reached(self) -> tuple[np.ndarray, np.ndarray]:
        """The ranks with the signal, and their logarithms. For `chance`: the expectations of a rank in a random order."""
        tokens, words = self.part.tokens, self.part.tokens.words or 1
        if self.after == "chance":
            return np.full(len(tokens), (words + 1) / 2.0), np.full(len(tokens), math.lgamma(words + 1) / words)
        return tokens.rank[self.after], np.log(tokens.rank[self.after])

    def factor(self) -> IntervalEstimate:
        """The mean rank before divided by the mean rank after."""
        above, below = (np.where(self.part.among, ranks, 0.0)
                        for ranks in (self.part.tokens.rank[self.before], self.reached()[0]))
        return self.part.tokens.clusters.ratio(above, below)

    def factor_of_geometric_means(self) -> IntervalEstimate:
        """The same for geometric means."""
        tokens = self.part.tokens
        return tokens.geometric_mean(np.log(tokens.rank[self.before]) - self.reached()[1], self.part.among)


DECOMPOSITION = Table("decomposition", (  # section 3.3
    ("tokens", "`all`, or the tokens that the target gives a probability below 0.01", lambda signal: signal.part.name),
    ("component", "source of signal that is added", lambda signal: signal.component),
    ("computation", "modes that are compared: before -> after",
     lambda signal: "-" if signal.before == signal.after else f"{signal.before} -> {signal.after}"),
    ("mean_rank", "mean rank with the added signal", lambda signal: signal.part.share(signal.reached()[0])),
    ("factor", "mean rank before divided by mean rank after; above 1 the signal helps", lambda signal: signal.factor()),
    ("factor_of_geometric_means", "the same for geometric means of ranks, which outliers move less",
     lambda signal: signal.factor_of_geometric_means()),
    ("n", "tokens of the row", lambda signal: signal.part.n),
))


def _readers(of: TokenSubset | DeepReadoutResult) -> Mapping[str, str]:
    return {reader: reader for reader in of.tokens.readers}


BLOCKS = Table("blocks", (  # section 3.4
    ("block", "number of the block in the answer, from 0, or a range of numbers",
     lambda part: str(part.first) if part.end == part.first + 1 else f"{part.first} - {part.end - 1}"),
    ("context_positions", "mean number of positions before the block that the draft sees",
     lambda part: part.share(part.tokens.context)),
    Each(_readers, [("rank_{reader}", "mean rank for this reader", lambda part, reader: part.rank(reader))]),
    _N,
))

# `factor` is 1, up to rounding, for the blocks that do not see the features again: they are the same in both modes.
REINJECTION = Table("reinjection", (  # section 6
    ("blocks", "whether the blocks of the row see the prompt's features again", lambda part: part.name),
    Each(lambda part: {reader: reader for reader in (TARGET, "mask", REINJECT)},
         [("mean_rank_{reader}", "mean rank for this reader", lambda part, reader: part.rank(reader))]),
    ("factor", "mean rank in the mode `mask` divided by that in the mode `reinject`",
     lambda part: SignalSource(part, "", "mask", REINJECT).factor()),
    ("factor_of_geometric_means", "the same for geometric means of ranks",
     lambda part: SignalSource(part, "", "mask", REINJECT).factor_of_geometric_means()),
    ("rank_improved", "share of tokens with a better rank in the mode `reinject`",
     lambda part: part.share(part.tokens.rank[REINJECT] < part.tokens.rank["mask"])),
    ("rank_worsened", "share of tokens with a worse rank in the mode `reinject`",
     lambda part: part.share(part.tokens.rank[REINJECT] > part.tokens.rank["mask"])),
    _N,
))

_CURVE = (
    ("reader", "`target`, or a mode of the draft", lambda part: part.mode),
    ("mean_rank", f"mean rank {_RANK}", lambda part: part.rank(part.mode)),
    ("geometric_mean_rank", "geometric mean of these ranks",
     lambda part: part.tokens.geometric_mean(np.log(part.tokens.rank[part.mode]), part.among)),
    ("mean_p", "mean probability of the gold tokens", lambda part: part.share(part.tokens.p[part.mode])),
    _N,
)
BLOCK_CURVES = Table("block_curves", (
    ("first_block", "first block of the group, from 0", lambda part: part.first),
    ("last_block", "last block of the group", lambda part: part.end - 1),
    *_CURVE,
))
POSITION_CURVES = Table("position_curves", (
    ("from", "smallest number of positions before the block in this bin", lambda part: part.first),
    ("to_below", "end of the bin, exclusive", lambda part: part.end),
    *_CURVE,
))


def overall(tokens: Tokens) -> list[dict]:
    """A row for each mode."""
    return OVERALL.rows(TokenSubset(tokens, tokens.all, mode=mode) for mode in tokens.modes)


def confidence(tokens: Tokens) -> list[dict]:
    """A row for each range of the target's probability of the token, and mode."""
    return CONFIDENCE.rows(
        TokenSubset(tokens, (tokens.p[TARGET] >= low) & (tokens.p[TARGET] < high), name, mode)
        for name, low, high in BUCKETS for mode in tokens.modes)


def decomposition(tokens: Tokens) -> list[dict]:
    """A row for each source of signal, for the tokens that the target finds least likely, as in the document, and for all."""
    again = [(PROMPT_AGAIN, "mask", REINJECT)] if REINJECT in tokens.modes else []
    subsets = (TokenSubset(tokens, tokens.p[TARGET] < BUCKETS[0][2], f"p_target {BUCKETS[0][0]}"),
               TokenSubset(tokens, tokens.all, "all"))
    return DECOMPOSITION.rows(SignalSource(subset, *signal) for subset in subsets for signal in (
        ("random baseline", "random", "random"), ("+ features", "random", "mask"), ("+ gold tokens", "mask", "gold"),
        ("features and gold tokens", "random", "gold"), *again, (TARGET, "random", TARGET), ("chance", "random", "chance")))


def blocks(tokens: Tokens) -> list[dict]:
    """A row for each group of blocks."""
    return BLOCKS.rows(_by_block(tokens))


def reinjection(tokens: Tokens) -> list[dict]:
    """A row for the blocks that see the prompt's features once more, and one for the others; none without `reinject`."""
    if REINJECT not in tokens.modes:
        return []
    return REINJECTION.rows(TokenSubset(tokens, among, name) for name, among in (
        ("with the prompt's features", tokens.reinjected), ("without", ~tokens.reinjected)))


def block_curves(tokens: Tokens) -> list[dict]:
    """The data of the figure by block: a row for each group of blocks and reader."""
    return BLOCK_CURVES.rows(group._replace(mode=reader) for group in _by_block(tokens) for reader in tokens.readers)


def position_curves(tokens: Tokens) -> list[dict]:
    """The data of the figure by position: a row for each bin and reader; bins have equal width on a logarithmic axis."""
    if not len(tokens):
        return []
    bins = np.floor(_BINS_AN_OCTAVE * np.log2(tokens.position)).astype(int)

    def end(index: int) -> int:
        return math.ceil(2.0 ** (index / _BINS_AN_OCTAVE))

    return POSITION_CURVES.rows(TokenSubset(tokens, bins == index, "", reader, end(index), end(index + 1))
                                for index in np.unique(bins) for reader in tokens.readers)


def _by_block(tokens: Tokens) -> Iterator[TokenSubset]:
    """The tokens of each group of blocks."""
    first, last = 0, int(tokens.block.max(initial=-1))
    while first <= last:
        end = first + 1 if first < _SINGLE_BLOCKS else 2 * first
        yield TokenSubset(tokens, (tokens.block >= first) & (tokens.block < end), first=first, end=end)
        first = end


class DeepReadoutResult(NamedTuple):
    """What the values of the summary are computed from: the tokens, and the rows of the decomposition."""

    tokens: Tokens
    signals: list[dict]

    @property
    def records(self) -> Sequence[dict]:
        """All records."""
        return self.tokens.records

    def factors(self, everything: bool) -> Mapping[str, Any]:
        """The factor of each signal that was measured, over all tokens or over those of low confidence."""
        names = {"+ features": "features", "+ gold tokens": "gold", PROMPT_AGAIN: "reinject", TARGET: "target"}
        factors = {row["component"]: row["factor"] for row in self.signals if (row["tokens"] == "all") == everything}
        return {name: factors[component] for component, name in names.items() if component in factors}


VALUES = Table("values", (
    PROBLEMS, SKIPPED,
    ("num_tokens", "compared tokens", lambda result: len(result.tokens)),
    ("num_low_confidence_tokens", "tokens that the target gives a probability below 0.01",
     lambda result: next(row["n"] for row in result.signals if row["tokens"] != "all")),
    Each(_readers, [("mean_rank_{reader}", "mean rank of all compared tokens for this reader",
                         lambda result, reader: result.tokens.mean(result.tokens.rank[reader]).value)]),
    Each(_readers, [("mean_p_{reader}", "mean probability of all compared tokens for this reader",
                         lambda result, reader: result.tokens.mean(result.tokens.p[reader]).value)]),
    Each(lambda result: result.factors(True), [
        ("{signal}_factor", "`factor` of the signal in `decomposition` (features, gold, reinject, target), over all tokens",
         lambda result, factor: factor)]),
    Each(lambda result: result.factors(False), [
        ("{signal}_factor_low_confidence", "the same over the tokens that the target gives a probability below 0.01",
         lambda result, factor: factor)]),
))


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


def count_parameters(model: LanguageModel, network: DFlash) -> ParameterCounts:
    """Parameters by component, and the sizes that the diagram needs, as JSON values.

    `target_other` counts the final norm and all other parameters, such as a table of positions. A tied head is counted in
    `head` too, although it is the embedding.
    """
    embedding, head, shape = model.decoder.get_input_embeddings().weight, model.head, network.shape
    layers, tied = _count([model.layers]), head.weight is embedding
    whole = _count([model.decoder, head])
    head_only = _count([head])
    return {
        "target_layers": layers, "embedding": embedding.numel(), "head": head_only, "tied": tied,
        "target_other": whole - layers - embedding.numel() - (head_only - embedding.numel() if tied else head_only),
        "draft_fc": _count([network.fc]), "draft_layers": _count([network.layers]),
        "draft_norms": _count([network.hidden_norm, network.norm]),
        "num_target_layers": len(model.layers), "num_draft_layers": len(network.layers),
        "tapped_layers": list(shape.target_layers), "hidden_size": shape.hidden_size,
        "words": model.vocab_size - int(model.forbidden.sum()),
    }


class ComponentParameters(NamedTuple):
    """A part of target or draft."""

    name: str
    parameters: int
    of: ParameterCounts
    role: str


PARAMETERS = Table("parameters", (  # section 4.1
    ("component", "part of target or draft", lambda part: part.name),
    ("parameters", "number of its parameters", lambda part: part.parameters),
    ("of_target_layers", "this number divided by that of the target's layers",
     lambda part: part.parameters / part.of["target_layers"]),
    ("role", "what the part does", lambda part: part.role),
))


def parameter_rows(counts: ParameterCounts) -> list[dict]:
    """A row for each part of target and draft."""
    taps, hidden, tied = len(counts["tapped_layers"]), counts["hidden_size"], counts["tied"]
    return PARAMETERS.rows(ComponentParameters(name, parameters, counts, role) for name, parameters, role in (
        (f"target: {counts['num_target_layers']} layers", counts["target_layers"], "deep processing"),
        ("target: embedding", counts["embedding"], "shared with the draft"),
        ("target: head", counts["head"], "shared with the draft" + (", same weights as the embedding" if tied else "")),
        ("target: other", counts["target_other"], "final norm, and positions if they are learned"),
        (f"draft: fc ({taps * hidden} to {hidden})", counts["draft_fc"], f"linear, {taps} to 1"),
        (f"draft: {counts['num_draft_layers']} layers", counts["draft_layers"], "read the features"),
        ("draft: norms", counts["draft_norms"], "after fc and at the end"),
    ))


class Extent(NamedTuple):
    """A run with at least one measured answer: its setting, and what was measured."""

    setting: Mapping[str, Any]
    counts: ParameterCounts
    records: Sequence[dict]

    @property
    def measured(self) -> list[dict]:
        """The records with tokens."""
        return [record for record in self.records if "skipped" not in record]

    @property
    def target_parameters(self) -> int:
        """Parameters of the target."""
        counts = self.counts
        head = 0 if counts["tied"] else counts["head"]
        return counts["target_layers"] + counts["embedding"] + head + counts["target_other"]


CONFIGURATION = Table("configuration", (
    ("dataset", "name of the dataset", lambda run: run.setting["dataset"]),
    ("answers", "`probe.answers`", lambda run: run.setting["answers"]),
    ("context", "`probe.context`", lambda run: run.setting["context"]),
    ("reinject_every", "`probe.reinject_every`", lambda run: run.setting["reinject_every"]),
    ("seed", "`seed`", lambda run: run.setting["seed"]),
    ("target_parameters", "parameters of the target; a head that is the embedding counts once",
     lambda run: run.target_parameters),
    ("draft_parameters", "parameters of the draft without the target's embedding and head",
     lambda run: run.counts["draft_fc"] + run.counts["draft_layers"] + run.counts["draft_norms"]),
    ("hidden_size", "width of both", lambda run: run.counts["hidden_size"]),
    ("target_layers", "layers of the target", lambda run: run.counts["num_target_layers"]),
    ("draft_layers", "layers of the draft", lambda run: run.counts["num_draft_layers"]),
    ("reads_layers", "layers of the target that the draft reads, from 0",
     lambda run: ", ".join(map(str, run.counts["tapped_layers"]))),
    ("block_size", "tokens of a block, with the known one", lambda run: run.measured[0]["block_size"]),
    ("problems", "measured answers", lambda run: len(run.measured)),
    ("skipped", "answers that were left out", lambda run: skipped(run.records)),
    ("blocks", "measured blocks", lambda run: sum(max(record["block"]) + 1 for record in run.measured)),
    ("tokens", "compared tokens", lambda run: sum(len(record["block"]) for record in run.measured)),
))

ALL = (VALUES, OVERALL, CONFIDENCE, DECOMPOSITION, BLOCKS, REINJECTION, PARAMETERS, CONFIGURATION, BLOCK_CURVES,
       POSITION_CURVES)


def _count(modules: Iterable[torch.nn.Module]) -> int:
    """Number of parameters of the modules; shared parameters count once."""
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())


def _joined(lists: list[list], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(values, dtype) for values in lists]) if lists else np.empty(0, dtype)
