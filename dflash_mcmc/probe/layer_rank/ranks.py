"""Ranks of an answer's tokens by layer: the record of an answer, and statistics of the records.

A row name says which distribution the ranks are from: `target`; `3 none` and `3 final` (layer 3, raw and after the final
norm); `draft`; and `target where drafted`, the target on the tokens that the draft predicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.columns import SKIPPED, Each, Table
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

if TYPE_CHECKING:
    import torch

    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.forcing.answers import Answer
    from dflash_mcmc.forcing.layers import Standing

_PUBLISHED_FROM_END = 3
"""Distance of the published layer from the end: layer 33 of 36."""
TARGET, DRAFT, TARGET_WHERE_DRAFTED = "target", "draft", "target where drafted"


def record(model: LanguageModel, draft: DFlashDrafter | None, answer: Answer, hard_below: float) -> dict:
    """The record of an answer.

    For every row name it has the rank of each token (null if the draft does not predict it). Over all tokens and over hard
    tokens it has the sum of log p in nats, and the number of positions at which the row's most likely token is also the
    target's most likely token. Raises NotNumbers.
    """
    import torch

    from dflash_mcmc.forcing import layers

    tokens = torch.from_numpy(answer.tokens).to(model.device)
    standing: dict[str, Standing] = {}
    for last, outputs in layers.readings(model, answer, range(len(model.layers))):
        if not standing:
            standing[TARGET] = layers.standings(model, layers.target_source(model, last), tokens)
        for layer, states in outputs.items():
            for norm in layers.NORMS:
                standing[f"{layer} {norm}"] = layers.standings(model, layers.layer_source(model, states, norm), tokens)
    every = torch.ones_like(tokens, dtype=torch.bool)
    speaks = dict.fromkeys(standing, every)
    if draft is not None:
        source = layers.draft_source(model, draft, answer)
        standing[DRAFT], standing[TARGET_WHERE_DRAFTED] = layers.standings(model, source, tokens), standing[TARGET]
        speaks[DRAFT] = speaks[TARGET_WHERE_DRAFTED] = source.speaks
    hard = standing[TARGET].log_p < math.log(hard_below)
    sums = {name: _sums(row, standing[TARGET], speaks[name], hard) for name, row in standing.items()}
    return {"num_tokens": len(tokens), "num_hard": int(hard.sum()), "vocabulary": int((~model.forbidden).sum()),
            "hard": hard.nonzero()[:, 0].tolist(),
            "ranks": {name: _where(row.rank.tolist(), speaks[name].tolist()) for name, row in standing.items()},
            "log_p": {name: [float(f"{value:.9g}") for value in log_p] for name, (log_p, _) in sums.items()},
            "agreements": {name: agreements for name, (_, agreements) in sums.items()}}


def _where(values: list[int], there: list[bool]) -> list[int | None]:
    return [value if here else None for value, here in zip(values, there, strict=True)]


def _sums(row: Standing, target: Standing, speaks: torch.Tensor, hard: torch.Tensor) -> tuple[list[float], list[int]]:
    """Sums of log p, and numbers of agreements with the target, each over all predicted tokens and over the hard ones."""
    parts = (speaks, speaks & hard)
    return [float(row.log_p[part].sum()) for part in parts], [int((row.best == target.best)[part].sum()) for part in parts]


def median_of(ranks: list[np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """A function for `Clusters.statistic`, from the weights of the problems to the median of all ranks.

    The median is the smallest rank that at least half of the ranks do not exceed. Bisection finds it. A resample has hundreds
    of thousands of ranks. They are never in memory together: for each value that bisection tries, the function only counts the
    ranks of each problem up to that value.
    """
    largest = max((int(of.max()) for of in ranks if len(of)), default=1)
    counts, offsets = np.array([len(of) for of in ranks]), (largest + 1) * np.arange(len(ranks))
    keys = np.concatenate([np.sort(of).astype(np.int64) + offset for of, offset in zip(ranks, offsets, strict=True)])
    before = np.cumsum(counts) - counts

    def median(weights: np.ndarray) -> np.ndarray:
        total = weights @ counts
        low, high = np.ones(len(weights), np.int64), np.full(len(weights), largest)
        while (low < high).any():
            tried, place = np.unique((low + high) // 2, return_inverse=True)
            upto = np.searchsorted(keys, offsets + tried[:, None], side="right") - before
            enough = 2 * (weights @ upto.T.astype(np.float64))[np.arange(len(weights)), place] >= total
            low, high = np.where(enough, low, tried[place] + 1), np.where(enough, tried[place], high)
        return np.where(total > 0, low, np.nan)

    return median


class Ranked:
    """The ranks in the records, of all tokens or of the hard ones.

    Args:
        records: results of `record`, one per problem, at least one.
    """

    def __init__(self, records: list[dict], hard_only: bool):
        self._records, self._part = records, int(hard_only)
        self._kept = [np.isin(np.arange(record["num_tokens"]), record["hard"]) if hard_only
                      else np.ones(record["num_tokens"], bool) for record in records]
        self.problems = Clusters(range(len(records)))

    def of(self, name: str) -> Row:
        """What the row of that name is computed from."""
        return Row(self, name)

    def ratio(self, above: list, below: list) -> IntervalEstimate:
        """The sum of `above` divided by that of `below`, both with a value for each problem."""
        return self.problems.ratio(above, below)

    def sums(self, field: str, name: str) -> list:
        """A sum of each record, `log_p` or `agreements`, over the tokens."""
        return [record[field][name][self._part] for record in self._records]

    def ranks(self, name: str) -> list[np.ndarray]:
        """The ranks of each problem, float64."""
        of = [np.array(record["ranks"][name], np.float64)[kept]
              for record, kept in zip(self._records, self._kept, strict=True)]
        return [values[~np.isnan(values)] for values in of]


class Row:
    """The ranks by one distribution: `target`, `3 none` (a layer and its norm), `draft` or `target where drafted`."""

    def __init__(self, ranked: Ranked, name: str):
        layer, _, norm = name.partition(" ")
        self.source = "layer" if layer.isdecimal() else name
        self.layer = int(layer) if layer.isdecimal() else None
        self.norm = norm if layer.isdecimal() else None
        self.name, self.ranked, self.ranks = name, ranked, ranked.ranks(name)
        self.counts = [len(values) for values in self.ranks]

    def mean(self, values: list) -> IntervalEstimate:
        """Mean over the tokens, from the sums of the problems."""
        return self.ranked.ratio(values, self.counts)

    @property
    def mean_rank(self) -> IntervalEstimate:
        """Mean rank."""
        return self.mean([values.sum() for values in self.ranks])

    @property
    def median_rank(self) -> IntervalEstimate:
        """Median rank, with an interval if two problems have tokens."""
        median = self.ranked.problems.statistic(median_of(self.ranks))
        return median if np.count_nonzero(self.counts) > 1 else median._replace(low=None, high=None)


class NormRow(NamedTuple):
    """A layer's ranks without and with the target's final norm."""

    raw: Row
    normed: Row

    def better(self, one: Row, other: Row) -> IntervalEstimate:
        """Share of tokens with a better rank in the first row."""
        return one.mean([(a < b).sum() for a, b in zip(one.ranks, other.ranks, strict=True)])

    @property
    def ratio(self) -> IntervalEstimate:
        """Quotient of the mean ranks."""
        return self.raw.ranked.ratio(*([values.sum() for values in row.ranks] for row in self))


_LAYERS = (
    ("source", "`layer` (the head on a layer's output), `target`, `draft`, or `target where drafted`: the target on the "
               "tokens that the draft predicts", lambda row: row.source),
    ("layer", "number of the layer, from 0", lambda row: row.layer),
    ("norm", "`none`: the raw output; `final`: after the target's final norm", lambda row: row.norm),
    ("mean_rank", "mean rank of the answer's tokens", lambda row: row.mean_rank),
    ("median_rank", "median rank of the answer's tokens", lambda row: row.median_rank),
    ("mean_log_p", "mean log-probability of the answer's tokens, nats",
     lambda row: row.mean(row.ranked.sums("log_p", row.name))),
    ("share_rank_1", "share of tokens with rank 1", lambda row: row.mean([(values == 1).sum() for values in row.ranks])),
    ("agreement", "share of tokens at which the most likely token is also the target's",
     lambda row: row.mean(row.ranked.sums("agreements", row.name))),
    ("n", "tokens of the row", lambda row: sum(row.counts)),
)
_NORMS = (
    ("layer", "number of the layer, from 0", lambda pair: pair.raw.layer),
    ("mean_rank_raw_over_normed", "raw mean rank divided by the mean rank after the final norm; above 1 the norm helps",
     lambda pair: pair.ratio),
    ("share_better_raw", "share of tokens with a better rank without the norm",
     lambda pair: pair.better(pair.raw, pair.normed)),
    ("share_better_normed", "share of tokens with a better rank after the norm",
     lambda pair: pair.better(pair.normed, pair.raw)),
    ("n", "tokens of the row", lambda pair: sum(pair.raw.counts)),
)
LAYERS = {part: Table(f"{part}layers", _LAYERS) for part in ("", "hard_")}
NORMS = {part: Table(f"{part}norms", _NORMS) for part in ("", "hard_")}


class Result(NamedTuple):
    """All records, and the rows of the table `layers`."""

    records: list[dict]
    rows: list[dict]

    @property
    def measured(self) -> list[dict]:
        """The records with tokens."""
        return [record for record in self.records if "skipped" not in record]

    def shown(self) -> dict[str, dict]:
        """The rows of the published layer, of target and draft."""
        published = max((row["layer"] for row in self.rows if row["layer"] is not None), default=0) + 1 - _PUBLISHED_FROM_END
        return {row["source"].replace(" ", "_") if row["layer"] is None else f"published_layer/{row['norm']}": row
                for row in self.rows if row["layer"] in (None, published)}


VALUES = Table("values", (
    SKIPPED,
    ("num_tokens", "tokens of all answers", lambda result: sum(record["num_tokens"] for record in result.measured)),
    ("num_hard", "hard tokens: those that the target gives a probability below `probe.hard_below`",
     lambda result: sum(record["num_hard"] for record in result.measured)),
    Each(lambda result: result.shown(), (
        ("{source}/mean_rank", "mean rank for target, draft, target where drafted, and the third layer from the end, "
                               "`published_layer/none` (raw) and `published_layer/final` (normed)",
         lambda _, row: row["mean_rank"]),
        ("{source}/median_rank", "its median rank", lambda _, row: row["median_rank"]),
    )),
    ("chance_rank", "mean rank of a token in a random order",
     lambda result: (result.measured[0]["vocabulary"] + 1) / 2 if result.measured else None),
))
ALL = (VALUES, LAYERS[""], LAYERS["hard_"], NORMS[""], NORMS["hard_"])


def summary(records: list[dict]) -> Summary:
    """The tables of layers and of norms, over all tokens and over hard ones.

    The value `published_layer` is for the third layer from the end, which is layer 33 of 36.
    """
    measured = [record for record in records if "skipped" not in record]
    names = list(measured[0]["ranks"]) if measured else []
    layers = sorted({int(layer) for layer in (name.partition(" ")[0] for name in names) if layer.isdecimal()})
    tables = {}
    for part, hard_only in (("", False), ("hard_", True)):
        ranked = Ranked(measured, hard_only)
        tables[f"{part}layers"] = LAYERS[part].rows(ranked.of(name) for name in names)
        tables[f"{part}norms"] = NORMS[part].rows(NormRow(ranked.of(f"{layer} none"), ranked.of(f"{layer} final"))
                                                  for layer in layers)
    return Summary(VALUES.row(Result(records, tables["layers"])), tables, {})
