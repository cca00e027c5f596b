"""Medians by bisection equal those of all observations, and tables equal those of a loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mcmc.probe.layer_rank import LAYERS, NORMS, NormRow, Ranked, median_of
from dflash_mcmc.statistics.intervals import Clusters


@pytest.mark.parametrize(("problems", "tokens", "largest"), [(2, 1, 2), (7, 3, 4), (20, 31, 100), (15, 8, 150_000)])
def test_median_and_interval_equal_those_of_all_tokens(problems, tokens, largest):
    generator = np.random.default_rng(problems)
    ranks = [generator.integers(1, largest + 1, tokens + number % 3).astype(float) for number in range(problems)]
    found = Clusters(range(problems)).statistic(median_of(ranks))
    (expected,) = Clusters(np.repeat(range(problems), [len(of) for of in ranks])).quantiles(np.concatenate(ranks), [0.5])
    assert (found.value, found.low, found.high) == (expected.value, expected.low, expected.high)


def test_median_if_problems_have_no_tokens():
    median = median_of([np.array([]), np.array([4.0, 9.0, 1.0]), np.array([7.0])])
    assert median(np.array([[1, 1, 1], [5, 0, 1]])).tolist() == [4.0, 7.0]
    assert np.isnan(median(np.array([[3, 0, 0]]))).all()
    assert Clusters(range(2)).statistic(median_of([np.array([]), np.array([])])).value is None


RECORDS = [
    {"num_tokens": 3, "hard": [1],
     "ranks": {"target": [1, 8, 1], "0 none": [2, 20, 1], "0 final": [1, 30, 1], "draft": [None, 6, 1]},
     "log_p": {"target": [-6.0, -5.0], "0 none": [-9.0, -7.0], "0 final": [-8.0, -6.0], "draft": [-4.0, -3.0]},
     "agreements": {"target": [3, 1], "0 none": [1, 0], "0 final": [2, 0], "draft": [1, 0]}},
    {"num_tokens": 1, "hard": [], "ranks": {"target": [3], "0 none": [5], "0 final": [4], "draft": [None]},
     "log_p": {"target": [-1.0, 0.0], "0 none": [-3.0, 0.0], "0 final": [-2.0, 0.0], "draft": [0.0, 0.0]},
     "agreements": {"target": [1, 0], "0 none": [0, 0], "0 final": [1, 0], "draft": [0, 0]}},
]


def test_rows_by_hand():
    row = LAYERS[""].row(Ranked(RECORDS, hard_only=False).of("0 none"))
    assert (row["source"], row["layer"], row["norm"], row["n"]) == ("layer", 0, "none", 4)
    assert (row["mean_rank"], row["median_rank"], row["mean_log_p"]) == (7.0, 2.0, -3.0)
    assert (row["share_rank_1"], row["agreement"]) == (0.25, 0.25)
    # A resample of two problems has the first twice, both, or the second twice.
    assert (row["mean_rank_low"], row["mean_rank_high"]) == (5.0, pytest.approx(23 / 3))
    draft = LAYERS[""].row(Ranked(RECORDS, hard_only=False).of("draft"))
    assert (draft["n"], draft["mean_rank"], draft["mean_log_p"], draft["agreement"]) == (2, 3.5, -2.0, 0.5)
    hard = LAYERS[""].row(Ranked(RECORDS, hard_only=True).of("0 none"))
    assert (hard["n"], hard["mean_rank"], hard["median_rank"]) == (1, 20.0, 20.0)
    assert (hard["mean_log_p"], hard["agreement"]) == (-7.0, 0.0)


def test_the_effect_of_the_norm_by_hand():
    ranked = Ranked(RECORDS, hard_only=False)
    row = NORMS[""].row(NormRow(ranked.of("0 none"), ranked.of("0 final")))
    assert row["mean_rank_raw_over_normed"] == pytest.approx(28 / 36)
    assert (row["share_better_raw"], row["share_better_normed"], row["n"]) == (0.25, 0.5, 4)


def test_no_values_without_hard_tokens():
    row = LAYERS[""].row(Ranked(RECORDS[1:], hard_only=True).of("target"))
    assert row["n"] == 0
    assert {row[name] for name in ("mean_rank", "median_rank", "mean_log_p", "share_rank_1", "agreement")} == {None}


def test_names_of_rows():
    ranked = Ranked([{**RECORDS[0], "ranks": {"12 final": [1, 1, 1], "target where drafted": [1, 1, 1]}}], hard_only=False)
    rows = map(ranked.of, ("12 final", "target where drafted"))
    assert [(row.source, row.layer, row.norm) for row in rows] == [
        ("layer", 12, "final"), ("target where drafted", None, None)]
