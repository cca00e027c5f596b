"""A column has its name, its meaning and its computation in one place."""

from __future__ import annotations

from dflash_mcmc.probe.columns import ABSENT, Each, Table, meanings_of
from dflash_mcmc.registry import components
from dflash_mcmc.statistics.intervals import IntervalEstimate

TABLE = Table("ranks", (
    ("n", "tokens", len),
    ("mean", "mean rank", lambda ranks: IntervalEstimate(2.0, 1.0, 3.0, len(ranks))),
    ("gone", "not in this row", lambda ranks: ABSENT),
    Each(lambda ranks: {"0.5": 5, "0.9": 9}, (
        ("above_{limit}", "ranks above it", lambda ranks, limit: sum(rank > limit for rank in ranks)),
        ("limit_{limit}", "the limit", lambda ranks, limit: limit))),
))


def test_a_row_has_the_columns_in_order():
    (row,) = TABLE.rows([[1, 6, 10]])
    assert list(row.items()) == [("n", 3), ("mean", 2.0), ("mean_low", 1.0), ("mean_high", 3.0), ("above_0.5", 2),
                                 ("limit_0.5", 5), ("above_0.9", 1), ("limit_0.9", 9)]


def test_parts_of_a_table_share_its_meanings():
    meanings = meanings_of([TABLE, Table("ranks", (("more", "another column", len),))])
    assert list(meanings["ranks"]) == ["n", "mean", "gone", "above_{limit}", "limit_{limit}", "more"]


def test_every_column_of_every_probe_has_a_meaning():
    for name, component in components("probe").items():
        meanings = meanings_of(component.cls.columns())
        assert bool(meanings) == (name != "none")
        assert all(meaning and not meaning.endswith(".") for columns in meanings.values() for meaning in columns.values())
