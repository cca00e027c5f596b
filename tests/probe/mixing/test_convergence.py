"""R-hat and ESS equal those of Vehtari et al. 2021; chains that never move do not count as well mixed."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc.kernel import MetropolisStep, result, trace_entry
from dflash_mcmc.probe.mixing import chains as conv
from dflash_mcmc.probe.mixing import tables
from dflash_mcmc.probe.mixing.chains import (
    COSTS,
    DECISIONS,
    Cell,
    Convergence,
    StepChain,
    Window,
    autocorrelation,
    cell_record,
    cells_of,
    convergence,
    window,
)
from dflash_mcmc.rng import Key
from dflash_mcmc.types import Cost, Trajectory


def convergence_row(cell, name):
    return tables.CONVERGENCE.row(conv.CellConvergence(cell, name))


def effective_samples_row(cell, name):
    return tables.EFFECTIVE_SAMPLES.row(conv.CellEss(cell, name))


def autocorrelation_rows(cell, name):
    return tables.BY_LAG.rows(conv.lags(cell, name))


def normal(*shape: int, name: str = "x") -> np.ndarray:
    return stats.norm.ppf(Key(3).fold_in(name).uniforms(0, int(np.prod(shape)))).reshape(shape)


def chain(log_p, moved=None, block=None, problem="a", number=0, forwards=100) -> StepChain:
    """A chain whose state always has five tokens."""
    log_p = np.asarray(log_p, float)
    moved = np.concatenate([[True], np.diff(log_p) != 0.0]) if moved is None else np.asarray(moved, bool)
    ones = np.ones(len(log_p), np.int64)
    return StepChain(problem, number, ones if block is None else np.asarray(block), ones, ones, 5 * ones, 5 * ones, 0.0 * ones,
                 log_p, np.where(moved, "a", "r"), log_p[-1], dict.fromkeys(COSTS, forwards))


def moving(log_p: np.ndarray) -> Window:
    return Window(log_p, np.ones(log_p.shape, bool))


def split_rhat(draws: np.ndarray) -> float:
    """Split R-hat by definition (Gelman et al. 2013, section 11.4)."""
    half = draws.shape[1] // 2
    parts = np.concatenate([draws[:, :half], draws[:, draws.shape[1] - half :]])
    between, within = half * parts.mean(axis=1).var(ddof=1), parts.var(axis=1, ddof=1).mean()
    return float(np.sqrt(((half - 1) / half * within + between / half) / within))


def rank_rhat(draws: np.ndarray) -> float:
    """The larger of the rank-normalised R-hats of bulk and tail (Vehtari et al. 2021, equations 14 and 15)."""
    def ranked(values: np.ndarray) -> np.ndarray:
        return stats.norm.ppf((stats.rankdata(values).reshape(values.shape) - 0.375) / (values.size + 0.25))

    return max(split_rhat(ranked(draws)), split_rhat(ranked(np.abs(draws - np.median(draws)))))


def test_rhat_equals_the_papers():
    for scale in (0.0, 1.0, 5.0):
        draws = normal(4, 30) + scale * np.arange(4)[:, None]
        assert convergence(moving(draws)).rhat == pytest.approx(rank_rhat(draws), rel=1e-9)


def test_independent_chains_have_converged_and_separated_ones_have_not():
    draws = normal(4, 500)
    found = convergence(moving(draws))
    assert found.rhat == pytest.approx(1.0, abs=0.01)
    assert found.ess == pytest.approx(2000, rel=0.15)
    apart = convergence(moving(draws + 5.0 * np.arange(4)[:, None]))
    assert apart.rhat > 2.0
    assert apart.ess < 10.0


def test_ess_of_an_autoregressive_chain():
    """The ESS of x_t = a x_(t-1) + noise is n (1 - a) / (1 + a)."""
    noise, draws = normal(4, 4000, name="noise"), np.zeros((4, 4000))
    for step in range(1, 4000):
        draws[:, step] = 0.8 * draws[:, step - 1] + noise[:, step]
    assert convergence(moving(draws)).ess == pytest.approx(16000 * 0.2 / 1.8, rel=0.2)


def of_values(*rows: list[float]) -> Window:
    """Chains that move when their value changes, and in the first step."""
    log_p = np.array(rows, float)
    return Window(log_p, np.diff(log_p, axis=1, prepend=np.nan) != 0.0)


@pytest.mark.parametrize("steps", [20, 28])  # for 14 equal ranks the mean is rounded, and the variance is not 0
def test_stuck_chains_are_counted_separately(steps):
    draws, still = normal(3, steps), np.zeros((3, steps), bool)
    level = np.arange(3.0)[:, None] * np.ones((3, steps))
    assert convergence(Window(level, still)) == Convergence(3, steps, 3, np.inf, 0.0)
    assert convergence(Window(np.ones((3, steps)), still)) == Convergence(3, steps, 3, None, 0.0)
    draws[0] = 0.5
    found = convergence(of_values(*draws))
    assert (found.stuck, found.rhat) == (1, pytest.approx(rank_rhat(draws)))
    assert 0.0 < found.ess <= 2 * steps  # of the two moving chains


def test_constant_halves_have_no_rhat():
    """The middle step is in neither half, so its move is in no half: arviz returns nan."""
    assert convergence(of_values([0, 0, 1, 0, 0], [0, 0, 2, 0, 0])).rhat is None
    assert convergence(of_values([0, 0, 1, 0, 0], [3, 3, 1, 3, 3])).rhat == np.inf
    row = convergence_row(cell_of(chain([0, 0, 1, 0, 0]), chain([0, 0, 0, 0, 0], number=1)), "all")
    assert (row["rhat_problems"], row["rhat"], row["rhat_above_1.1"], row["rhat_infinite"]) == (0, None, None, None)


@pytest.mark.parametrize("at", [2, 12, 21])
def test_a_single_move_counts_as_two_states(at):
    """Four chains of 24 steps, three of them stuck on one value: arviz returns 6 to 41 draws."""
    rows = [[1.0] * at + [0.0] * (24 - at), *[[0.0] * 24] * 3]
    assert convergence(of_values(*rows)).ess == 2.0
    rows[0][-1] = 2.0
    assert convergence(of_values(*rows)).ess == 3.0


def test_effective_samples_are_at_most_the_draws():
    """For alternating chains arviz returns N log10 N, twice the number of draws."""
    assert convergence(of_values(*[[0.0, 1.0] * 30] * 2)).ess == 120.0
    for number in range(20):
        assert convergence(moving(normal(2, 20, name=str(number)))).ess <= 40.0


def test_steps_that_keep_their_state_are_one_draw():
    """Four chains of a hundred independent values, each kept for five steps."""
    assert convergence(of_values(*np.repeat(normal(4, 100), 5, axis=1))).ess == pytest.approx(400, rel=0.15)


def test_a_move_in_the_first_step_does_not_count():
    assert Window(np.ones((2, 4)), np.array([[True, False, False, False], [False, True, False, False]])).stuck.tolist() == [
        True, False]


def test_short_and_single_chains():
    assert convergence(moving(normal(4, 3))) == Convergence(4, 3, 0, None, None)
    assert [convergence(moving(normal(4, steps))).ess is None for steps in (4, 9, 19, 20)] == [True, True, True, False]
    found = convergence(moving(normal(1, 50)))
    assert found.rhat is None
    assert found.ess > 10.0
    two = np.array([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]])  # constant when folded around the median
    assert convergence(moving(two)).rhat == pytest.approx(split_rhat(two))


def test_windows_end_with_the_chains():
    chains = [chain([1, 2, 3, 4, 5, 6, 7], block=[1, 1, 1, 1, 2, 2, 2]), chain([8, 9, 10, 11, 12], block=[1, 1, 1, 2, 2])]
    assert window(chains, "all").log_p.tolist() == [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]
    assert window(chains, "last_half").log_p.tolist() == [[5, 6, 7], [10, 11, 12]]
    assert window(chains, "last_stage").log_p.tolist() == [[6, 7], [11, 12]]


def test_autocorrelation_equals_the_textbooks():
    values = normal(17)
    around = values - values.mean()
    by_hand = [sum(around[t] * around[t + lag] for t in range(17 - lag)) / sum(around**2) for lag in range(17)]
    assert autocorrelation(values) == pytest.approx(by_hand)


def test_independent_draws_have_the_expected_autocorrelation():
    curves = np.mean([autocorrelation(draws) for draws in normal(4000, 6)], axis=0)
    expected = [conv.independent_autocorrelation(6, lag) for lag in range(1, 6)]
    assert curves[1:] == pytest.approx(expected, abs=0.02)


def cell_of(*chains: StepChain) -> Cell:
    return Cell(4.0, 0.25, "off", list(chains), 0)


def test_the_table_of_convergence():
    level = [np.full(8, 1.0), np.full(8, 2.0)]
    mixed, apart = normal(2, 8, name="mixed"), normal(2, 8, name="apart") + np.array([[0.0], [50.0]])
    cell = cell_of(*(chain(draws, problem=problem) for problem, rows in
                     (("stuck", level), ("agree", [level[0]] * 2), ("mixed", mixed), ("apart", apart)) for draws in rows),
                   chain([1.0, 2.0, 3.0], problem="short"))
    row = convergence_row(cell, "all")
    rhats = [rank_rhat(mixed), rank_rhat(apart)]
    assert rhats[0] < rhats[1]
    assert (row["fewest_steps"], row["most_steps"], row["too_short"]) == (3, 8, 1)
    assert (row["stuck"], row["chains"], row["all_stuck"], row["problems"]) == (0.5, 8, 0.5, 4)
    assert (row["rhat_problems"], row["rhat_infinite"]) == (3, pytest.approx(1 / 3))
    assert row["rhat"] == pytest.approx(rhats[1])
    assert row["rhat_low"] <= row["rhat"]
    assert row["rhat_high"] is None  # infinite
    assert row["rhat_above_1.1"] == np.mean([np.inf > 1.1, rhats[0] > 1.1, rhats[1] > 1.1])
    short = convergence_row(cell_of(chain([1.0, 2.0])), "all")
    assert (short["rhat"], short["stuck"], short["rhat_problems"], short["too_short"]) == (None, None, 0, 1)


def test_rhats_of_independent_draws():
    many = conv.independent_rhats(4, 8)
    assert many.shape == (conv.DRAWS,)
    row = convergence_row(cell_of(*(chain(draws, number=n) for n, draws in enumerate(normal(4, 8)))), "all")
    assert row["independent_above_1.01"] == np.mean(many > 1.01)
    assert row["independent_above_1.1"] == np.mean(many > 1.1) < row["independent_above_1.01"]


def test_stuck_problems_add_no_effective_samples():
    draws = normal(2, 20)
    alone = effective_samples_row(cell_of(*(chain(values) for values in draws)), "all")
    assert alone["ess_per_step"] == pytest.approx(convergence(moving(draws)).ess / 40)
    assert alone["ess_per_1000_token_forwards"] == pytest.approx(1000 * convergence(moving(draws)).ess / 200)
    stuck = [chain(np.ones(20), problem="b", forwards=300)] * 2
    both = effective_samples_row(cell_of(*(chain(values) for values in draws), *stuck), "all")
    assert both["ess_per_step"] == pytest.approx(alone["ess_per_step"] / 2)
    assert both["ess_per_1000_token_forwards"] == pytest.approx(alone["ess_per_1000_token_forwards"] / 4)
    assert (both["problems"], both["too_short"]) == (2, 0)


def test_problems_too_short_for_effective_samples_are_left_out_and_counted():
    draws, short = normal(2, 20), [chain(values, problem="s") for values in normal(2, 19)]
    long = [chain(values) for values in draws]
    both, alone = (effective_samples_row(cell_of(*chains), "all") for chains in ([*long, *short], long))
    assert (both["ess_per_step"], both["problems"], both["too_short"]) == (alone["ess_per_step"], 1, 1)
    assert (both["fewest_steps"], both["most_steps"]) == (19, 20)
    none = effective_samples_row(cell_of(*short), "all")
    assert (none["ess_per_step"], none["ess_per_1000_token_forwards"], none["too_short"]) == (None, None, 1)
    assert convergence_row(cell_of(*short), "all")["too_short"] == 0


def test_the_table_of_autocorrelation():
    draws = normal(3, 6)
    cell = cell_of(*(chain(values, problem=str(number)) for number, values in enumerate(draws)),
                   chain(np.ones(6), problem="s"), chain([1.0, 2.0, 3.0], problem="short"))
    rows = autocorrelation_rows(cell, "all")
    assert [row["lag"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["autocorrelation"] == pytest.approx(np.mean([autocorrelation(values)[row["lag"]] for values in draws]))
        assert (row["chains"], row["stuck"]) == (3, 1)
        assert row["independent"] == pytest.approx(-(6 - row["lag"]) / 30)
    assert autocorrelation_rows(cell_of(chain(np.ones(6))), "all") == []


# A chain's trace survives the record; log p changes only if the state does.

def path_of(log_p: list[float]) -> Trajectory:
    """A sequence whose tokens have these log-probabilities."""
    return Trajectory.start(np.array([1])).extended(np.arange(len(log_p)), np.array(log_p), np.array(log_p),
                                              np.zeros((len(log_p), 2)), False)


STEPS = [MetropolisStep(path_of([-1.0, -1.0, -0.3]), 1, 3, 0.25, "accept"),
         MetropolisStep(path_of([-1.0, -1.0, -0.300001234]), 2, 3, 0.0, "identical"),
         MetropolisStep(path_of([-1.0, -1.0, -0.300001234, -0.5]), 0, 2, -3.123456789, "abandon"),
         MetropolisStep(path_of([-1.0, -1.0, -0.300001234, -0.5]), 3, 5, -1.5, "reject")]


@pytest.fixture
def record() -> dict:
    """A chain of two stages: the state has 2 tokens, moves to 3, is proposed again, grows to 4 and stays."""
    trace = [trace_entry(step, block, number, length) for step, block, number, length in
             zip(STEPS, (1, 1, 2, 2), (1, 2, 1, 2), (2, 3, 4, 4), strict=True)]
    found = cell_record((4.0, 0.25, "exact"), result(STEPS[-1].trajectory, STEPS, 0.0, trace), Cost(12, 9, 30, 4), "")
    failed = cell_record((4.0, 1.0, "off"), None, Cost(token_forwards=7), "no numbers")
    return {"problem": "a", "chain": 3, "cells": [found, failed]}


def test_a_record_stores_the_trace_by_column(record):
    found = record["cells"][0]
    assert found["trace"]["decision"] == "aixr"
    assert found["trace"]["cut"] == [1, 2, 0, 3]
    assert found["trace"]["log_ratio"] == [0.25, 0.0, -3.12346, -1.5]
    assert {name: found[name] for name in ("alpha", "temperature", "early_reject", "num_tokens", "log_p", "proposals",
                                           "accepted", "moved", "abandoned", "tokens_drawn", "token_forwards")} == {
        "alpha": 4.0, "temperature": 0.25, "early_reject": "exact", "num_tokens": 4, "log_p": -2.8, "proposals": 4,
        "accepted": 2, "moved": 1, "abandoned": 1, "tokens_drawn": 12, "token_forwards": 30}
    assert record["cells"][1] == {"alpha": 4.0, "temperature": 1.0, "early_reject": "off", "failure": "no numbers",
                                  "tokens_drawn": 0, "tokens_skipped": 0, "token_forwards": 7, "target_forwards": 0}


def test_the_chains_of_a_cell_are_read_back(record):
    cell, failed = cells_of([record])
    (chain,) = cell.chains
    assert (chain.problem, chain.number, chain.num_steps, cell.num_failed) == ("a", 3, 4, 0)
    assert (failed.chains, failed.num_failed, failed.temperature) == ([], 1, 1.0)
    assert chain.moved.tolist() == [True, False, False, False]
    assert chain.accepted.tolist() == [True, True, False, False]
    steps = cell.steps()
    assert steps.problem == ["a"] * 4
    assert steps.identical.tolist() == [False, True, False, False]
    assert steps.abandoned.tolist() == [False, False, True, False]
    assert steps.real.all()
    assert cell.problems == {"a": [chain]}
    assert failed.steps().problem == []


def test_log_p_of_an_unchanged_sequence_is_constant(record):
    """The step that proposes the state itself has a slightly different log p from rounding; after it the state grows."""
    record["cells"][0]["trace"]["log_p"] = [-2.3, -2.30001, -2.8, -2.80003]
    (chain,) = cells_of([record])[0].chains
    assert chain.log_p.tolist() == [-2.3, -2.3, -2.8, -2.8]
    record["cells"][0]["trace"].update(decision="aara", proposal_length=[3, 3, 2, 4], log_p=[-2.3, -2.4, -2.8, -2.9])
    assert cells_of([record])[0].chains[0].log_p.tolist() == [-2.3, -2.4, -2.8, -2.9]  # a move to the same number of tokens


def test_every_decision_of_the_kernel_has_a_letter():
    assert len(set(DECISIONS.values())) == len(DECISIONS)
    assert set(DECISIONS) == {step.decision for step in STEPS}


# The tables of the mixing probe compared with counts by hand.

# cut, length, proposal length, log ratio, decision
FIRST = [(0, 10, 10, 0.5, "a"), (9, 10, 10, 0.0, "i"), (5, 10, 7, -4.0, "x"), (2, 10, 30, -0.02, "r")]
SECOND = [(15, 20, 20, 0.0, "i"), (3, 20, 90, 200.0, "a"), (89, 90, 90, 0.0, "i"), (10, 90, 12, -0.3, "x")]
PAST_THE_END = [(12, 10, 10, 0.0, "i")]


def cells_row(cell):
    return tables.CELLS.row(tables.Proposals(cell, cell.steps()))


def walk(steps: list[tuple], problem: str = "a", number: int = 0, last_log_p: float = -5.0, **cost: int) -> StepChain:
    cut, length, proposal, ratio, decision = zip(*steps, strict=True)
    ones = np.ones(len(steps), np.int64)
    return StepChain(problem, number, ones, ones, np.array(cut), np.array(length), np.array(proposal), np.array(ratio, float),
                 -ones.astype(float), np.array(decision), last_log_p, {**dict.fromkeys(COSTS, 10), **cost})


def cell_with(*chains: StepChain, early_reject: str = "exact", num_failed: int = 0) -> Cell:
    return Cell(4.0, 0.25, early_reject, list(chains), num_failed)


@pytest.fixture
def cell() -> Cell:
    return cell_with(walk(FIRST, tokens_drawn=30, tokens_skipped=10), walk(SECOND, "b", last_log_p=-7.0, token_forwards=30),
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
    cell = cell_with(walk(PAST_THE_END))
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
    cell = cell_with(*(walk(moving if number % 2 else still, problem=str(number)) for number in range(8)))
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
            tables.moves(cell_with(walk(first_moves), walk([(0, 5, 5, 0.0, "a")] * 2, "b")))}
    assert [(rows[n, 1]["share"], rows[n, 1]["chains"]) for n in (1, 2, 4)] == [(0.5, 2), (0.5, 2), (1.0, 1)]


def test_the_documents_chance_to_move_at_a_mean_acceptance():
    """1 - 0.9^10 = 65 %, and 7 % for at least three moves, at an acceptance of 0.1, as in speculative_mcmc_probe."""
    hits, clusters = np.array([1.0]), tables.Clusters(["a"])
    assert tables.independent_moves(clusters, hits, 10, 1).value == pytest.approx(1 - 0.9**10)
    assert tables.independent_moves(clusters, hits, 10, 3).value == pytest.approx(0.0702, abs=1e-4)


def test_early_rejection_is_compared_with_the_same_chains_without():
    rejected = [(*step[:4], "r") if step[4] == "x" else step for step in FIRST]
    off = cell_with(walk(rejected, tokens_drawn=40, token_forwards=100), walk(SECOND, "b", tokens_drawn=60),
                  early_reject="off")
    cell = cell_with(walk(SECOND, "b", tokens_drawn=30), walk(FIRST, tokens_drawn=20, token_forwards=45))
    (row,) = tables.early_rejection([off, cell])
    assert (row["tokens_drawn"], row["token_forwards"], row["target_forwards"]) == (0.5, 0.5, 1.0)
    assert (row["early_reject"], row["same"], row["chains"]) == ("exact", 1.0, 2)
    assert tables.early_rejection([cell]) == tables.early_rejection([off]) == []
    for decision in "ri":
        other = cell_with(walk([(0, 10, 10, 0.5, decision), *FIRST[1:]]))
        assert tables.early_rejection([off, other])[0]["same"] == 0.0


def test_a_cell_without_chains():
    empty = cell_with(num_failed=2)
    assert cells_row(empty)["acceptance"] is None
    assert cells_row(empty)["failed"] == 2
    assert tables.COST.row(tables.Spent(empty))["complete_tokens"] is None
    assert tables.moves(empty) == []
    assert tables.early_rejection([cell_with(early_reject="off"), empty])[0]["chains"] == 0
    assert {row["n"] for row in tables.log_ratios(empty)} == {0}
