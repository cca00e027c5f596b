"""The tables of the mixing probe compared with counts by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mcmc.probe.mixing import tables
from dflash_mcmc.probe.mixing.chains import COSTS, Cell, StepChain

# cut, length, proposal length, log ratio, decision
FIRST = [(0, 10, 10, 0.5, "a"), (9, 10, 10, 0.0, "i"), (5, 10, 7, -4.0, "x"), (2, 10, 30, -0.02, "r")]
SECOND = [(15, 20, 20, 0.0, "i"), (3, 20, 90, 200.0, "a"), (89, 90, 90, 0.0, "i"), (10, 90, 12, -0.3, "x")]
PAST_THE_END = [(12, 10, 10, 0.0, "i")]


def cells_row(cell):
    return tables.CELLS.row(tables.Proposals(cell, cell.steps()))


def chain(steps: list[tuple], problem: str = "a", number: int = 0, last_log_p: float = -5.0, **cost: int) -> StepChain:
    cut, length, proposal, ratio, decision = zip(*steps, strict=True)
    ones = np.ones(len(steps), np.int64)
    return StepChain(problem, number, ones, ones, np.array(cut), np.array(length), np.array(proposal), np.array(ratio, float),
                 -ones.astype(float), np.array(decision), last_log_p, {**dict.fromkeys(COSTS, 10), **cost})


def cell_of(*chains: StepChain, early_reject: str = "exact", num_failed: int = 0) -> Cell:
    return Cell(4.0, 0.25, early_reject, list(chains), num_failed)


@pytest.fixture
def cell() -> Cell:
    return cell_of(chain(FIRST, tokens_drawn=30, tokens_skipped=10), chain(SECOND, "b", last_log_p=-7.0, token_forwards=30),
                   num_failed=1)


def without_intervals(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.endswith(("_low", "_high"))}


def test_cells(cell):
    row = cells_row(cell)
    assert without_intervals(row) == {
        "alpha": 4.0, "temperature": 0.25, "early_reject": "exact", "acceptance": 5 / 8, "moved_rate": 2 / 8,
        "identical": 3 / 8, "abandoned": 2 / 8, "log_p": -6.0, "proposals": 8, "chains": 2, "problems": 2, "failed": 1}
    assert row["acceptance_low"] == 0.5
    assert row["acceptance_high"] == 0.75


def test_cost(cell):
    row = tables.COST.row(tables.Spent(cell))
    assert (row["complete_tokens"], row["complete"]) == (pytest.approx((10 + 1 + 28 + 5 + 87 + 1) / 6), 6)
    assert (row["abandoned_tokens"], row["abandoned"]) == (2.0, 2)
    assert (row["skipped_share"], row["tokens"]) == (20 / 60, 60)
    assert (row["token_forwards"], row["target_forwards"], row["chains"]) == (20.0, 10.0, 2)


def test_by_cut(cell):
    rows = tables.by_cut(cell)
    assert [(row["cut"], row["proposals"], row["acceptance"], row["moved_rate"], row["abandoned"]) for row in rows] == [
        ("0-0.2", 3, 2 / 3, 2 / 3, 1 / 3), ("0.2-0.4", 1, 0.0, 0.0, 0.0), ("0.4-0.6", 1, 0.0, 0.0, 1.0),
        ("0.6-0.8", 1, 1.0, 0.0, 0.0), ("0.8-1", 2, 1.0, 0.0, 0.0)]


def test_by_length(cell):
    rows = tables.by_length(cell)
    assert [(row["suffix"], row["proposals"], row["acceptance"], row["moved_rate"]) for row in rows] == [
        ("1-4", 2, 1.0, 0.0), ("5-8", 3, 1 / 3, 0.0), ("9-16", 1, 1.0, 1.0), ("17-32", 1, 1.0, 1.0), ("33-64", 0, None, None),
        ("65+", 1, 0.0, 0.0)]


def test_a_cut_past_the_end_proposes_nothing():
    cell = cell_of(chain(PAST_THE_END))
    assert cells_row(cell)["identical"] == 1.0
    assert sum(row["proposals"] for row in tables.by_cut(cell) + tables.by_length(cell)) == 0
    assert sum(row["n"] for row in tables.log_ratios(cell)) == 0
    assert tables.COST.row(tables.Spent(cell))["complete"] == 0


def test_log_ratios(cell):
    complete, different, every = tables.log_ratios(cell)
    assert (complete["n"], complete["P5"], complete["P50"], complete["P95"]) == (6, -0.02, 0.0, 200.0)
    assert (different["n"], different["P5"], different["P50"], different["P95"]) == (3, -0.02, 0.5, 200.0)
    assert (every["n"], every["abandoned"], every["P5"], every["P25"]) == (8, 2, -4.0, -0.3)


def test_log_ratio_counts(cell):
    rows = tables.log_ratio_counts(cell)
    found = {(row["low"], row["high"]): (row["identical"], row["different"], row["abandoned"]) for row in rows
             if row["identical"] or row["different"] or row["abandoned"]}
    assert found == {(-10, -3): (0, 0, 1), (-0.3, -0.1): (0, 0, 1), (-0.03, -0.01): (0, 1, 0), (-0.01, 0.01): (3, 0, 0),
                     (0.3, 1): (0, 1, 0), (100, None): (0, 1, 0)}
    assert rows[0]["low"] is None


def test_moves_of_unequal_chains_differ_from_those_of_the_mean():
    """Half of the chains move at each of ten steps, the other half never; all proposals are accepted."""
    moving, still = [(0, 5, 5, 0.0, "a")] * 10, [(4, 5, 5, 0.0, "i")] * 10
    cell = cell_of(*(chain(moving if number % 2 else still, problem=str(number)) for number in range(8)))
    rows = {(row["steps"], row["at_least"]): row for row in tables.moves(cell)}
    assert list(rows) == [(1, 1), (2, 1), (4, 1), (4, 3), (8, 1), (8, 3)]
    assert {row["share"] for row in rows.values()} == {0.5}
    assert rows[8, 1]["by_acceptance"] == 1.0
    assert rows[8, 1]["by_moved_rate"] == pytest.approx(1 - 0.5**8)
    assert rows[4, 3]["by_moved_rate"] == pytest.approx(5 / 16)
    assert rows[8, 1]["chains"] == 8
    assert rows[8, 1]["share_low"] < 0.5 < rows[8, 1]["share_high"]


def test_moves_are_in_the_last_steps_of_long_enough_chains():
    first_moves = [(0, 5, 5, 0.0, "a"), *[(0, 5, 5, -9.0, "r")] * 3]
    rows = {(row["steps"], row["at_least"]): row for row in
            tables.moves(cell_of(chain(first_moves), chain([(0, 5, 5, 0.0, "a")] * 2, "b")))}
    assert [(rows[n, 1]["share"], rows[n, 1]["chains"]) for n in (1, 2, 4)] == [(0.5, 2), (0.5, 2), (1.0, 1)]


def test_the_documents_chance_to_move_at_a_mean_acceptance():
    """1 - 0.9^10 = 65 %, and 7 % for at least three moves, at an acceptance of 0.1, as in speculative_mcmc_probe."""
    hits, clusters = np.array([1.0]), tables.Clusters(["a"])
    assert tables.independent_moves(clusters, hits, 10, 1).value == pytest.approx(1 - 0.9**10)
    assert tables.independent_moves(clusters, hits, 10, 3).value == pytest.approx(0.0702, abs=1e-4)


def test_early_rejection_is_compared_with_the_same_chains_without():
    rejected = [(*step[:4], "r") if step[4] == "x" else step for step in FIRST]
    off = cell_of(chain(rejected, tokens_drawn=40, token_forwards=100), chain(SECOND, "b", tokens_drawn=60),
                  early_reject="off")
    cell = cell_of(chain(SECOND, "b", tokens_drawn=30), chain(FIRST, tokens_drawn=20, token_forwards=45))
    (row,) = tables.early_rejection([off, cell])
    assert (row["tokens_drawn"], row["token_forwards"], row["target_forwards"]) == (0.5, 0.5, 1.0)
    assert (row["early_reject"], row["same"], row["chains"]) == ("exact", 1.0, 2)
    assert tables.early_rejection([cell]) == tables.early_rejection([off]) == []
    for decision in "ri":
        other = cell_of(chain([(0, 10, 10, 0.5, decision), *FIRST[1:]]))
        assert tables.early_rejection([off, other])[0]["same"] == 0.0


def test_a_cell_without_chains():
    empty = cell_of(num_failed=2)
    assert cells_row(empty)["acceptance"] is None
    assert cells_row(empty)["failed"] == 2
    assert tables.COST.row(tables.Spent(empty))["complete_tokens"] is None
    assert tables.moves(empty) == []
    assert tables.early_rejection([cell_of(early_reject="off"), empty])[0]["chains"] == 0
    assert {row["n"] for row in tables.log_ratios(empty)} == {0}
