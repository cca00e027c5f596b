"""R-hat and ESS equal those of Vehtari et al. 2021; chains that never move do not count as well mixed."""

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc.rng import Key
from dflash_mcmc.statistics.chains import (
    StepChain,
    Window,
    autocorrelation,
    chain_of,
    ess,
    independent_autocorrelation,
    independent_rhats,
    rhat,
    window,
)


def normal(*shape: int, name: str = "x") -> np.ndarray:
    return stats.norm.ppf(Key(3).fold_in(name).uniforms(0, int(np.prod(shape)))).reshape(shape)


def moving(log_p: np.ndarray) -> Window:
    return Window(log_p, *[np.ones(log_p.shape, bool)] * 2)


def of_values(*rows: list[float]) -> Window:
    """Chains that move when their value changes, and in the first step."""
    log_p = np.array(rows, float)
    return Window(log_p, *[np.diff(log_p, axis=1, prepend=np.nan) != 0.0] * 2)


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


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0])
def test_rhat_equals_the_papers(scale):
    draws = normal(4, 30) + scale * np.arange(4)[:, None]
    assert rhat(moving(draws)) == pytest.approx(rank_rhat(draws), rel=1e-9)


def test_ess_of_an_autoregressive_chain():
    """The ESS of x_t = a x_(t-1) + noise is n (1 - a) / (1 + a)."""
    noise, draws = normal(4, 4000, name="noise"), np.zeros((4, 4000))
    for step in range(1, 4000):
        draws[:, step] = 0.8 * draws[:, step - 1] + noise[:, step]
    assert ess(moving(draws)) == pytest.approx(16000 * 0.2 / 1.8, rel=0.2)


@pytest.mark.parametrize("steps", [20, 28])  # for 14 equal ranks the mean is rounded, and the variance is not 0
def test_stuck_chains_have_no_effective_samples(steps):
    draws, still = normal(3, steps), np.zeros((3, steps), bool)
    level = np.arange(3.0)[:, None] * np.ones((3, steps))
    assert (rhat(Window(level, still, still)), ess(Window(level, still, still))) == (np.inf, 0.0)
    assert (rhat(Window(np.ones((3, steps)), still, still)), ess(Window(np.ones((3, steps)), still, still))) == (None, 0.0)
    draws[0] = 0.5
    found = of_values(*draws)
    assert (found.stuck.sum(), rhat(found)) == (1, pytest.approx(rank_rhat(draws)))
    assert 0.0 < ess(found) <= 2 * steps  # of the two moving chains


def test_constant_halves_have_no_rhat():
    """The middle step is in neither half, so its move is in no half."""
    assert rhat(of_values([0, 0, 1, 0, 0], [0, 0, 2, 0, 0])) is None
    assert rhat(of_values([0, 0, 1, 0, 0], [3, 3, 1, 3, 3])) == np.inf


@pytest.mark.parametrize("at", [2, 12, 21])
def test_a_single_move_counts_as_two_states(at):
    """Four chains of 24 steps, three of them stuck on one value: the estimator alone gives 6 to 41 draws."""
    rows = [[1.0] * at + [0.0] * (24 - at), *[[0.0] * 24] * 3]
    assert ess(of_values(*rows)) == 2.0
    rows[0][-1] = 2.0
    assert ess(of_values(*rows)) == 3.0


def test_effective_samples_are_at_most_the_draws():
    """For alternating chains the estimator alone gives N log10 N, twice the number of draws."""
    assert ess(of_values(*[[0.0, 1.0] * 30] * 2)) == 120.0
    for number in range(20):
        assert ess(moving(normal(2, 20, name=str(number)))) <= 40.0


def test_steps_that_keep_their_state_are_one_draw():
    """Four chains of a hundred independent values, each kept for five steps."""
    assert ess(of_values(*np.repeat(normal(4, 100), 5, axis=1))) == pytest.approx(400, rel=0.15)


def test_short_and_single_chains_have_no_numbers():
    assert rhat(moving(normal(1, 30))) is None
    assert rhat(moving(normal(4, 3))) is None
    assert ess(moving(normal(4, 19))) is None
    assert ess(moving(normal(4, 20))) is not None


def test_autocorrelation_of_independent_draws_is_as_expected():
    values = np.mean([autocorrelation(row)[1] for row in normal(4000, 12)])
    assert values == pytest.approx(independent_autocorrelation(12, 1), abs=0.01)
    assert autocorrelation(normal(50))[0] == pytest.approx(1.0)


def test_independent_chains_are_rarely_above_the_limit():
    found = independent_rhats(4, 200)
    assert found.shape == (200,)
    assert np.mean(found > 1.1) == 0.0
    assert np.mean(independent_rhats(2, 4) > 1.1) > 0.3


def entry(block, length, proposed, log_p, decision):
    return {"block": block, "step": 1, "cut": 0, "length": length, "proposal_length": proposed, "log_ratio": 0.0,
            "decision": decision, "log_p": log_p}


def test_a_trace_becomes_the_states_of_a_chain():
    """A proposal that repeats the state, or is refused, keeps the log p that was there, and not its recomputed rounding."""
    trace = [entry(1, 4, 5, -3.0, "accept"), entry(1, 5, 5, -3.0000001, "identical"), entry(1, 5, 6, -3.0000002, "reject"),
             entry(2, 8, 8, -4.0, "reject")]
    found = chain_of({"problem": "a", "trace": trace})
    assert (found.log_p.tolist(), found.moved.tolist()) == ([-3.0, -3.0, -3.0, -4.0], [True, False, False, False])
    assert found.accepted.tolist() == [True, True, False, False]
    assert found.block.tolist() == [1, 1, 1, 2]
    assert chain_of({"problem": "a", "trace": []}) is None
    assert chain_of({"problem": "a", "trace": [{**trace[0], "rung": 1}]}) is None


def test_windows_take_the_same_last_steps_of_each_chain():
    def chain(*values, block=None):
        blocks = np.ones(len(values), int) if block is None else np.array(block)
        return StepChain("a", blocks, np.array(values, float), *[np.ones(len(values), bool)] * 2)

    chains = [chain(1, 2, 3, 4, 5, block=[1, 1, 2, 2, 2]), chain(6, 7, 8, 9, block=[1, 2, 2, 2])]
    assert window(chains, "all").log_p.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert window(chains, "last half").log_p.tolist() == [[4, 5], [8, 9]]
    assert window(chains, "last stage").log_p.tolist() == [[3, 4, 5], [7, 8, 9]]
