"""The weights of each rule: exact answer laws on the tabular engine, the published formula by hand; wrong rules fail."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.statistics.rules import AnswerPower, PowerVote, SoftSat
from dflash_mcmc.testing import power_target, score

HORIZON, EXACT, WRONG = 3, 1e-12, 1e-3
ENGINE = TabularEngine(TabularModel(3, (0,), seed=5, scale=0.4))
STATES = power_target(ENGINE, HORIZON, 1.0, SamplingParams(), "blended").states
ANSWERS = ("0", "1", "2")


def answer_of(tokens: tuple[int, ...]) -> str | None:
    """The number of tokens 2 in a sequence that ended; a sequence that did not end has no answer."""
    return str(tokens.count(2)) if tokens[-1] == 0 else None


def answer_law(alpha: float) -> np.ndarray:
    """The law of the answers under p^alpha of whole sequences, among the sequences with an answer."""
    target, mass = power_target(ENGINE, HORIZON, alpha, SamplingParams(), "blended"), Counter()
    for tokens, probability in zip(target.states, target.probability, strict=True):
        mass[answer_of(tokens)] += probability
    values = np.array([mass[answer] for answer in ANSWERS])
    return values / values.sum()


def columns(drawn: list[tuple[int, ...]], log_q: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(supports, votes, log_p, log_q) of chains; `supports` is (chains, answers)."""
    supports = np.array([[answer_of(tokens) == answer for answer in ANSWERS] for tokens in drawn])
    log_p = np.array([score(ENGINE, tokens, SamplingParams(), "blended").log_p.sum() for tokens in drawn])
    return supports, supports.any(axis=1), log_p, np.array(log_q)


def enumeration(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All equally likely draws from a law q that has no relation to p: each sequence, as often as q says."""
    counts = np.random.default_rng(seed).integers(1, 6, len(STATES))
    drawn = [tokens for tokens, count in zip(STATES, counts, strict=True) for _ in range(count)]
    return columns(drawn, [math.log(count / counts.sum()) for count in counts for _ in range(count)])


def scores_of(rule, supports, votes, log_p, log_q) -> np.ndarray:
    return rule.weights(votes, log_p, log_q) @ supports


class WithoutLogQ(PowerVote):
    def weights(self, votes, log_p, log_q):
        return PowerVote.weights(self, votes, log_p, np.zeros_like(log_q))


class PowerOfTheRatio(PowerVote):
    def weights(self, votes, log_p, log_q):
        return PowerVote.weights(self, votes, log_p, self.alpha * log_q)


class SilentChainsCount(PowerVote):
    def weights(self, votes, log_p, log_q):
        return PowerVote.weights(self, np.ones_like(votes), log_p, log_q)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_power_scores_are_the_answer_law_of_p_alpha(alpha, seed):
    found = scores_of(PowerVote(alpha=alpha), *enumeration(seed))
    assert np.abs(found - answer_law(alpha)).max() <= EXACT
    assert PowerVote(alpha=alpha).chances(found).tolist() == (found == found.max()).astype(float).tolist()


@pytest.mark.parametrize("mutant", [WithoutLogQ, PowerOfTheRatio, SilentChainsCount])
def test_wrong_weights_do_not_have_that_law(mutant):
    found = scores_of(mutant(alpha=4.0), *enumeration(0))
    assert np.abs(found - answer_law(4.0)).max() > WRONG


def test_many_draws_converge_within_the_bound_of_their_variance():
    """Draws with a penalty at another temperature, whose support is all sequences. The bound is 5 standard errors."""
    params = SamplingParams(temperature=0.8, presence_penalty=0.3)
    log_q = np.array([score(ENGINE, tokens, params, "blended").log_q.sum() for tokens in STATES])
    places = np.random.default_rng(3).choice(len(STATES), 20_000, p=np.exp(log_q))
    supports, votes, log_p, _ = columns(STATES, log_q.tolist())
    chosen = supports[places], votes[places], log_p[places], log_q[places]
    for alpha in (1.0, 2.0, 4.0):
        weights = PowerVote(alpha=alpha).weights(*chosen[1:])
        law = answer_law(alpha)
        bound = 5.0 * np.sqrt((weights[:, None] ** 2 * (chosen[0] - law) ** 2).sum(axis=0))
        assert bound.max() < 0.05
        assert (np.abs(weights @ chosen[0] - law) <= bound).all()
        if alpha > 1.0:
            assert (np.abs(scores_of(WithoutLogQ(alpha=alpha), *chosen) - law) > bound).any()


class GammaPerSample(AnswerPower):
    def weights(self, votes, log_p, log_q):
        found = AnswerPower.weights(self, votes, log_p, log_q) ** self.gamma
        return found / found.sum()

    def chances(self, scores):
        return scores / scores.sum()


@pytest.mark.parametrize(("alpha", "gamma"), [(2.0, 2.0), (4.0, 1.0), (1.0, 3.0), (2.0, 0.5)])
def test_answer_power_is_the_answer_law_raised_to_gamma(alpha, gamma):
    chains, expected = enumeration(1), answer_law(alpha) ** gamma
    rule, mutant = AnswerPower(alpha=alpha, gamma=gamma), GammaPerSample(alpha=alpha, gamma=gamma)
    assert np.abs(rule.chances(scores_of(rule, *chains)) - expected / expected.sum()).max() <= EXACT
    if gamma != 1.0:
        assert np.abs(mutant.chances(scores_of(mutant, *chains)) - expected / expected.sum()).max() > WRONG


def softsat(**changes) -> SoftSat:
    return SoftSat(**{"beta": 1.0, "saturation": 0.75, "low": 0.75, "high": 17.0, **changes})


def by_hand(u: float, beta: float = 1.0, saturation: float = 0.75) -> float:
    return math.exp(beta * (1.0 - (1.0 - min(u / saturation, 1.0)) ** 2))


class WrongEnd(SoftSat):
    def weights(self, votes, log_p, log_q):
        return SoftSat.weights(self, votes, -log_p, log_q)


def test_softsat_is_the_published_formula():
    """Four votes and a likely chain that does not vote. The two equal values have the mean of the ranks 2 and 3."""
    votes, log_p = np.array([True, True, False, True, True]), np.array([-1.0, -3.0, 0.0, -2.0, -2.0])
    expected = np.array([by_hand(1.0), by_hand(0.25), 0.0, by_hand(0.625), by_hand(0.625)])
    found = softsat().weights(votes, log_p, np.full(5, np.nan))
    assert found == pytest.approx(expected / expected.sum(), abs=EXACT)
    parameters = {"beta": 1.0, "saturation": 0.75, "low": 0.75, "high": 17.0}
    assert WrongEnd(**parameters).weights(votes, log_p, log_p)[0] < found[0] - WRONG
    assert softsat(beta=0.0).weights(votes, log_p, log_p) == pytest.approx([0.25, 0.25, 0.0, 0.25, 0.25], abs=EXACT)


def test_softsat_weights_saturate_and_are_clipped():
    votes, log_p = np.ones(8, bool), np.arange(8.0)
    found = softsat().weights(votes, log_p, log_p)
    assert found[5] == found[6] == found[7] > found[4] > found[3]  # rank 6 of 8 is the saturation
    ratio = found[7] / found[0]
    assert ratio == pytest.approx(by_hand(1.0) / by_hand(1 / 8), abs=EXACT)
    clipped = softsat(beta=10.0).weights(votes, log_p, log_p)
    assert clipped[7] / clipped[0] == pytest.approx(17.0 / min(17.0, by_hand(1 / 8, beta=10.0)), abs=EXACT)
    raised = softsat(low=2.0).weights(votes, log_p, log_p)
    assert raised[7] / raised[0] == pytest.approx(by_hand(1.0) / 2.0, abs=EXACT)


@pytest.mark.parametrize("rule", [PowerVote(alpha=4.0), softsat(), AnswerPower(alpha=2.0, gamma=2.0)],
                         ids=lambda rule: rule.name)
def test_no_votes_have_no_weight_and_very_unlikely_chains_have_one(rule):
    none = np.zeros(3, bool)
    weights = rule.weights(none, np.zeros(3), np.zeros(3))
    assert weights.tolist() == [0.0, 0.0, 0.0]
    assert rule.chances(np.zeros(2)).tolist() == [0.0, 0.0]
    assert rule.chances(np.zeros(0)).tolist() == []
    far = np.array([-90_000.0, -90_001.0, -90_000.0])
    found = rule.weights(np.ones(3, bool), far, far)
    assert found.sum() == pytest.approx(1.0)
    assert found[0] == found[2] > found[1]


def test_the_engine_gives_log_q_of_the_draws_with_penalties():
    """The weights rest on log q of whole sequences: it is the law that the tokens are drawn from, and sums to one."""
    for params in (SamplingParams(temperature=0.7), SamplingParams(repetition_penalty=1.4)):
        found = [score(ENGINE, tokens, params, "blended") for tokens in STATES]
        assert sum(math.exp(path.log_q.sum()) for path in found) == pytest.approx(1.0, abs=EXACT)
        assert not params.truncates
    assert all(params.truncates for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1),
                                               SamplingParams(temperature=0.0)))
