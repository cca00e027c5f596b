"""A column has its name, its meaning and its computation in one place."""

import numpy as np

from dflash_mcmc.components import registered
from dflash_mcmc.probe import ABSENT, Each, Observations, Table, meanings_of
from dflash_mcmc.statistics.estimates import IntervalEstimate

TABLE = Table("ranks", (
    ("name", "what it is called"),
    ("n", "tokens", lambda of: of.n),
    ("rank", "mean rank"),
    ("gone", "not in this row", lambda of: ABSENT),
    Each(lambda of: {"0.5": 5, "0.9": 9}, (
        ("above_{limit}", "share of ranks above it", lambda of, limit: of.mean(of.values["rank"] > limit).value),)),
    Each(lambda of: of["parts"], (("of_{part}", "the part", lambda of, part: part),)),
))
TOKENS = Observations({"problem": ["a", "a", "b", "b"], "rank": [1, 6, 10, 4]}, name="all", parts=("x",))


def test_a_row_has_the_columns_in_order():
    (row,) = TABLE.rows([TOKENS])
    assert list(row.items()) == [("name", "all"), ("n", 4), ("rank", 5.25), ("rank_low", 3.5), ("rank_high", 7.0),
                                 ("above_0.5", 0.5), ("above_0.9", 0.25), ("of_x", "x")]
    assert Table("ranks", (("n", "draws"),)).row({"n": 7}) == {"n": 7}


def test_a_part_of_the_observations_has_their_resamples():
    """A resample has both problems, or one of them twice; that without a selected token is left out."""
    part = TOKENS.row(np.array([True, False, True, True])).row(np.array([True, True, True, False]), name="part")
    assert (part["name"], part.n, part["rank"]) == ("part", 2, IntervalEstimate(5.5, 1.0, 10.0, 2))
    assert part.ratio("rank", [1, 1, 4, 1]).value == 11 / 5
    assert TOKENS.quantiles("rank", [0.5])[0].value == 4


def test_sums_are_weighed_by_their_numbers():
    sums = Observations({"problem": ["a", "b"], "n": [1, 4], "gain": [2.0, -4.0]})
    assert (sums.n, sums["gain"].value, sums.mean([1, 1]).value) == (5, -0.4, 0.4)


def test_parts_of_a_table_share_its_meanings():
    meanings = meanings_of([TABLE, Table("ranks", (("more", "another column", len),))])
    assert list(meanings["ranks"]) == ["name", "n", "rank", "gone", "above_{limit}", "of_{part}", "more"]


def test_every_column_of_every_probe_has_a_meaning():
    for name, component in registered("probe").items():
        meanings = meanings_of(component.cls.columns())
        assert bool(meanings) == (name != "none")
        assert all(meaning and not meaning.endswith(".") for columns in meanings.values() for meaning in columns.values())
