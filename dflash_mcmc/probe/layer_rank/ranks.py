"""Ranks of an answer's tokens by layer: the record of an answer, and statistics of the records.

A row name says which distribution the ranks are from: `target`; `3 none` and `3 final` (layer 3, raw and after the final
norm); `draft`; and `target where drafted`, the target on the tokens that the draft predicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from dflash_mcmc.statistics.intervals import Clusters

if TYPE_CHECKING:
    import torch

    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.forcing.answers import Answer
    from dflash_mcmc.forcing.layers import Standing

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
    found: dict[str, Standing] = {}
    for last, outputs in layers.readings(model, answer, range(len(model.layers))):
        if not found:
            found[TARGET] = layers.standings(model, layers.target_source(model, last), tokens)
        for layer, states in outputs.items():
            for norm in layers.NORMS:
                found[f"{layer} {norm}"] = layers.standings(model, layers.layer_source(model, states, norm), tokens)
    every = torch.ones_like(tokens, dtype=torch.bool)
    speaks = dict.fromkeys(found, every)
    if draft is not None:
        source = layers.draft_source(model, draft, answer)
        found[DRAFT], found[TARGET_WHERE_DRAFTED] = layers.standings(model, source, tokens), found[TARGET]
        speaks[DRAFT] = speaks[TARGET_WHERE_DRAFTED] = source.speaks
    hard = found[TARGET].log_p < math.log(hard_below)
    sums = {name: _sums(row, found[TARGET], speaks[name], hard) for name, row in found.items()}
    return {"num_tokens": len(tokens), "num_hard": int(hard.sum()), "vocabulary": int((~model.forbidden).sum()),
            "hard": hard.nonzero()[:, 0].tolist(),
            "ranks": {name: _where(row.rank.tolist(), speaks[name].tolist()) for name, row in found.items()},
            "log_p": {name: [float(f"{value:.9g}") for value in log_p] for name, (log_p, _) in sums.items()},
            "agreements": {name: agreements for name, (_, agreements) in sums.items()}}


def _where(values: list[int], there: list[bool]) -> list[int | None]:
    return [value if here else None for value, here in zip(values, there, strict=True)]


def _sums(row: Standing, target: Standing, speaks: torch.Tensor, hard: torch.Tensor) -> tuple[list[float], list[int]]:
    """Sums of log p, and numbers of agreements with the target, each over all predicted tokens and over the hard ones."""
    parts = (speaks, speaks & hard)
    return [float(row.log_p[part].sum()) for part in parts], [int((row.best == target.best)[part].sum()) for part in parts]


class RowName(TypedDict):
    """The columns that identify a row of the tables."""

    source: str
    layer: int | None
    norm: str | None


def described(name: str) -> RowName:
    """The columns of a row's name."""
    layer, _, norm = name.partition(" ")
    if layer.isdecimal():
        return {"source": "layer", "layer": int(layer), "norm": norm}
    return {"source": name, "layer": None, "norm": None}


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
        self._problems = Clusters(range(len(records)))

    def row(self, name: str) -> dict:
        """A row of the table: means, median and shares with their intervals, and the number of tokens."""
        ranks = self._ranks(name)
        counts = [len(values) for values in ranks]
        median = self._problems.statistic(median_of(ranks))
        if np.count_nonzero(counts) < 2:  # an interval over problems needs two
            median = median._replace(low=None, high=None)
        mean = self._problems.ratio([values.sum() for values in ranks], counts)
        log_p, agreements = ([record[field][name][self._part] for record in self._records]
                             for field in ("log_p", "agreements"))
        return {**described(name), **mean.columns("mean_rank"), **median.columns("median_rank"),
                **self._problems.ratio(log_p, counts).columns("mean_log_p"),
                **self._problems.ratio([(values == 1).sum() for values in ranks], counts).columns("share_rank_1"),
                **self._problems.ratio(agreements, counts).columns("agreement"), "n": mean.n}

    def norm_row(self, layer: int) -> dict:
        """The effect of the final norm on a layer: raw mean rank divided by normed mean rank, and two shares.

        They are the share of tokens with a better raw rank, and the share of tokens with a better normed rank.
        """
        raw, normed = self._ranks(f"{layer} none"), self._ranks(f"{layer} final")
        counts = [len(values) for values in raw]
        better = {"share_better_raw": [(a < b).sum() for a, b in zip(raw, normed, strict=True)],
                  "share_better_normed": [(b < a).sum() for a, b in zip(raw, normed, strict=True)]}
        ratio = self._problems.ratio([values.sum() for values in raw], [values.sum() for values in normed])
        return {"layer": layer, **ratio.columns("mean_rank_raw_over_normed"),
                **{column: value for name, wins in better.items()
                   for column, value in self._problems.ratio(wins, counts).columns(name).items()}, "n": sum(counts)}

    def _ranks(self, name: str) -> list[np.ndarray]:
        """The ranks of each problem, float64."""
        of = [np.array(record["ranks"][name], np.float64)[kept]
              for record, kept in zip(self._records, self._kept, strict=True)]
        return [values[~np.isnan(values)] for values in of]
