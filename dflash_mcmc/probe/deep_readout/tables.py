"""The tables of the document `deep_readout_diagnostic`, sections 3.1 to 3.4, with intervals, computed from the records.

Ranks begin at 1, and tokens with equal logits share a rank. The draft or the target wins a token if it is strictly better.
Mean ranks are sensitive to outliers, so the tables also have medians or geometric means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

TARGET, MODES = "target", ("mask", "gold", "random")
REINJECT = "reinject"
"""The mode of section 6, which is measured only if the probe asks for it."""
READERS = (TARGET, *MODES)
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


def overall(tokens: Tokens) -> list[dict]:
    """Section 3.1: a row per mode."""
    rows, mean = [], tokens.clusters.mean
    median = {reader: tokens.clusters.quantiles(tokens.rank[reader], [0.5])[0] for reader in tokens.readers}
    for mode in tokens.modes:
        row: dict[str, str | float | None] = {"mode": mode}
        for name, values in (("p", tokens.p), ("rank", tokens.rank)):
            row |= mean(values[TARGET]).columns(f"mean_{name}_target") | mean(values[mode]).columns(f"mean_{name}_draft")
        row |= median[TARGET].columns("median_rank_target") | median[mode].columns("median_rank_draft")
        rows.append(row | _wins(tokens, mode) | {"n": len(tokens)})
    return rows


def confidence(tokens: Tokens) -> list[dict]:
    """Section 3.2: wins and mean ranks by the target's probability of the token."""
    rows = []
    for bucket, low, high in BUCKETS:
        among = (tokens.p[TARGET] >= low) & (tokens.p[TARGET] < high)
        for mode in tokens.modes:
            row: dict[str, str | float | None] = {"p_target": bucket, "mode": mode}
            for reader, column in ((TARGET, "mean_rank_target"), (mode, "mean_rank_draft")):
                row |= tokens.clusters.mean(tokens.rank[reader], among).columns(column)
            rows.append(row | _wins(tokens, mode, among) | {"n": int(among.sum())})
    return rows


def decomposition(tokens: Tokens) -> list[dict]:
    """Section 3.3: the factor by which each source of signal lowers the mean rank, and the geometric mean of ranks.

    It is computed for the tokens that the target finds least likely, as in the document, and for all tokens.
    """
    rows, again = [], [(PROMPT_AGAIN, "mask", REINJECT)] if REINJECT in tokens.modes else []
    for name, among in ((f"p_target {BUCKETS[0][0]}", tokens.p[TARGET] < BUCKETS[0][2]), ("all", np.ones(len(tokens), bool))):
        for component, before, after in (("random baseline", "random", "random"), ("+ features", "random", "mask"),
                                         ("+ gold tokens", "mask", "gold"), ("features and gold tokens", "random", "gold"),
                                         *again, (TARGET, "random", TARGET), ("chance", "random", "chance")):
            row = {"tokens": name, "component": component, "computation": "-" if before == after else f"{before} -> {after}"}
            rows.append(row | _factors(tokens, before, after, among) | {"n": int(among.sum())})
    return rows


def blocks(tokens: Tokens) -> list[dict]:
    """Section 3.4: mean ranks by block number."""
    rows, last = [], int(tokens.block.max(initial=-1))
    for first, end in _block_groups(last):
        among = (tokens.block >= first) & (tokens.block < end)
        row = {"block": str(first) if end == first + 1 else f"{first} - {end - 1}",
               **tokens.clusters.mean(tokens.context, among).columns("context_positions")}
        for reader in tokens.readers:
            row |= tokens.clusters.mean(tokens.rank[reader], among).columns(f"rank_{reader}")
        rows.append(row | {"n": int(among.sum())})
    return rows


def reinjection(tokens: Tokens) -> list[dict]:
    """Section 6: what the prompt's features add in the blocks that see them once more. No rows without the mode `reinject`.

    `factor` is the factor by which the mean rank falls from the mode `mask` to the mode `reinject`. It is 1, up to rounding,
    for the blocks that do not see the features again, because these blocks are the same in both modes.
    """
    if REINJECT not in tokens.modes:
        return []
    rows = []
    for name, among in (("with the prompt's features", tokens.reinjected), ("without", ~tokens.reinjected)):
        row: dict[str, str | float | None] = {"blocks": name}
        for reader in (TARGET, "mask", REINJECT):
            row |= tokens.clusters.mean(tokens.rank[reader], among).columns(f"mean_rank_{reader}")
        fallen = (np.where(among, tokens.rank[mode], 0.0) for mode in ("mask", REINJECT))
        row |= tokens.clusters.ratio(*fallen).columns("factor")
        row |= _geometric_mean(tokens, np.log(tokens.rank["mask"]) - np.log(tokens.rank[REINJECT]), among).columns(
            "factor_of_geometric_means")
        better = tokens.clusters.mean(tokens.rank[REINJECT] < tokens.rank["mask"], among)
        worse = tokens.clusters.mean(tokens.rank[REINJECT] > tokens.rank["mask"], among)
        rows.append(row | better.columns("rank_improved") | worse.columns("rank_worsened") | {"n": int(among.sum())})
    return rows


def extent(records: Sequence[dict]) -> dict[str, int]:
    """The columns of the table of configuration that say what was measured, for at least one measured answer."""
    kept = [record for record in records if "skipped" not in record]
    return {"block_size": kept[0]["block_size"], "problems": len(kept), "skipped": len(records) - len(kept),
            "blocks": sum(max(record["block"]) + 1 for record in kept), "tokens": sum(len(record["block"]) for record in kept)}


def block_curves(tokens: Tokens) -> list[dict]:
    """The data of the figure by block: a row per group of blocks and reader."""
    groups = _block_groups(int(tokens.block.max(initial=-1)))
    return [{"first_block": first, "last_block": end - 1, **row} for first, end in groups
            for row in _curve(tokens, (tokens.block >= first) & (tokens.block < end))]


def position_curves(tokens: Tokens) -> list[dict]:
    """The data of the figure by position: a row per reader and bin; bins have equal width on a logarithmic axis."""
    if not len(tokens):
        return []
    of = np.floor(_BINS_AN_OCTAVE * np.log2(tokens.position)).astype(int)
    bounds = [[math.ceil(2.0 ** ((number + end) / _BINS_AN_OCTAVE)) for end in (0, 1)] for number in np.unique(of)]
    return [{"from": low, "to_below": high, **row} for number, (low, high) in zip(np.unique(of), bounds, strict=True)
            for row in _curve(tokens, of == number)]


def summary_values(tokens: Tokens, table: list[dict]) -> dict[str, float | int | None]:
    """The values for comparisons between runs. `table` is the decomposition."""
    low = [row for row in table if row["tokens"] != "all"]
    values = {f"mean_rank_{reader}": tokens.clusters.mean(tokens.rank[reader]).value for reader in tokens.readers}
    values |= {f"mean_p_{reader}": tokens.clusters.mean(tokens.p[reader]).value for reader in tokens.readers}
    factors = {"features_factor": "+ features", "gold_factor": "+ gold tokens", "reinject_factor": PROMPT_AGAIN,
               "target_factor": TARGET}
    for end, rows in (("", [row for row in table if row["tokens"] == "all"]), ("_low_confidence", low)):
        values |= {f"{name}{end}": row["factor"] for name, wanted in factors.items() for row in rows
                   if row["component"] == wanted}
    return {"num_tokens": len(tokens), "num_low_confidence_tokens": low[0]["n"], **values}


def _wins(tokens: Tokens, mode: str, among: np.ndarray | None = None) -> dict[str, float | None]:
    """Shares of tokens for which the draft has a strictly better rank, and a strictly better probability."""
    by_rank = tokens.clusters.mean(tokens.rank[mode] < tokens.rank[TARGET], among)
    by_p = tokens.clusters.mean(tokens.p[mode] > tokens.p[TARGET], among)
    return by_rank.columns("rank_draft_wins") | by_p.columns("p_draft_wins")


def _factors(tokens: Tokens, before: str, after: str, among: np.ndarray) -> dict[str, float | None]:
    """The mean rank with the signal `after`, and the factor by which it is below the mean rank with `before`."""
    words = tokens.words or 1
    if after == "chance":  # the rank of a token in a random order, and the mean of its logarithm
        reached, logarithm = np.full(len(tokens), (words + 1) / 2.0), np.full(len(tokens), math.lgamma(words + 1) / words)
    else:
        reached, logarithm = tokens.rank[after], np.log(tokens.rank[after])
    above, below = np.where(among, tokens.rank[before], 0.0), np.where(among, reached, 0.0)
    factor = tokens.clusters.ratio(above, below)
    geometric = _geometric_mean(tokens, np.log(tokens.rank[before]) - logarithm, among)
    return (tokens.clusters.mean(reached, among).columns("mean_rank") | factor.columns("factor")
            | geometric.columns("factor_of_geometric_means"))


def _geometric_mean(tokens: Tokens, logarithms: np.ndarray, among: np.ndarray) -> IntervalEstimate:
    return tokens.clusters.mean(logarithms, among).mapped(math.exp)


def _curve(tokens: Tokens, among: np.ndarray) -> list[dict]:
    """A row per reader, over the tokens that `among` selects."""
    return [{"reader": reader, **tokens.clusters.mean(tokens.rank[reader], among).columns("mean_rank"),
             **_geometric_mean(tokens, np.log(tokens.rank[reader]), among).columns("geometric_mean_rank"),
             **tokens.clusters.mean(tokens.p[reader], among).columns("mean_p"), "n": int(among.sum())}
            for reader in tokens.readers]


def _block_groups(last: int) -> list[tuple[int, int]]:
    """Groups of block numbers up to `last`, as (first, end), end exclusive."""
    groups, first = [], 0
    while first <= last:
        end = first + 1 if first < _SINGLE_BLOCKS else 2 * first
        groups.append((first, end))
        first = end
    return groups


def _joined(lists: list[list], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(values, dtype) for values in lists]) if lists else np.empty(0, dtype)
