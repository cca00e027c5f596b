"""R-hat and ESS equal those of Vehtari et al. 2021; chains that never move do not count as well mixed."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc.probe.mixing import chains as conv
from dflash_mcmc.probe.mixing import tables
from dflash_mcmc.probe.mixing.chains import COSTS, Cell, Convergence, StepChain, Window, autocorrelation, convergence, window
from dflash_mcmc.rng import Key


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
