"""`sampler=lookahead` on the tabular engine: its law by enumeration, and how far it is from p^alpha."""

import math

import numpy as np
import pytest

from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.lookahead import Lookahead
from dflash_mcmc.testing import PROMPT, law_of, power_target, product_target, score, total_variation

ENGINE = TabularEngine(TabularModel(3, (0,), seed=1, scale=0.7))
HORIZON = 2


def make(**changes):
    values = dict(alpha=3.0, num_candidates=2, num_rollouts=1, rollout_length=0, block_size=1, temperature=None, top_k=0,
                  top_p=1.0)
    return Lookahead(**{**values, **changes})


def law(sampler, engine=ENGINE, horizon=HORIZON):
    return law_of(lambda key: engine.run(sampler.chain(PROMPT, horizon, key)).trajectory)


def distance(sampler, engine=ENGINE, horizon=HORIZON):
    """Total variation from p^alpha."""
    target = power_target(engine, horizon, sampler.alpha, sampler.law(), "blended")
    return total_variation(law(sampler, engine, horizon), dict(zip(target.states, target.probability, strict=True)))


def law_by_hand(sampler):
    """The law of two candidates of one token, without rollouts, from its definition."""
    engine, params, target = ENGINE, sampler.law(), {}
    single = product_target(engine, 1, params)
    weight = {x: math.exp(sampler.alpha * score(engine, x, params, "blended").log_p[0]) / single[x] for x in single}
    for x, p in single.items():
        for y, q in single.items():
            target[x] = target.get(x, 0.0) + 2 * p * q * weight[x] / (weight[x] + weight[y])
    return target


def test_the_law_of_one_block_without_rollouts_by_hand():
    sampler = make(temperature=0.8)
    found, expected = law(sampler, horizon=1), law_by_hand(sampler)
    assert total_variation(found, expected) < 1e-12


ERRORS = {0: 0.27603486632138124, 1: 0.14896008559153445}
"""Total variation from p^3 with two candidates of one token, by the length of the one rollout after each. The longest answers
have two tokens."""


@pytest.mark.parametrize("rollout_length", ERRORS)
def test_the_error_of_the_law_is_a_number(rollout_length):
    """The sampler is approximate. Rollouts make its error smaller, and do not make it zero."""
    assert distance(make(rollout_length=rollout_length)) == pytest.approx(ERRORS[rollout_length], abs=1e-9)


def test_a_candidate_has_the_mean_weight_of_its_rollouts():
    """Two rollouts of each candidate, weighed by hand. A complete candidate has none, and its factor is 1."""
    sampler = make(num_rollouts=2, rollout_length=3, temperature=0.8)
    open_ones = [score(ENGINE, (token,), sampler.law(), "blended") for token in (1, 2)]
    complete = score(ENGINE, (0,), sampler.law(), "blended")
    asked = sampler._ahead([open_ones[0], complete, open_ones[1]], 2, Key(3))
    rollouts = [score(ENGINE, tokens, sampler.law(), "blended") for tokens in ((1, 0), (1, 2), (2, 0), (2, 1))]
    request = next(asked)
    assert [draw.trajectory.tokens.tolist() for draw in request.operations] == [[1], [1], [2], [2]]
    assert [draw.horizon for draw in request.operations] == [2] * 4  # a rollout ends with the longest answer
    with pytest.raises(StopIteration) as found:
        asked.send(tuple(rollouts))
    weights = [math.exp(3.0 * path.log_p[1] - path.log_q[1]) for path in rollouts]
    assert np.exp(found.value.value) == pytest.approx([sum(weights[:2]) / 2, 1.0, sum(weights[2:]) / 2])


def test_the_record_has_the_effective_size_of_candidates():
    done = ENGINE.run(make(num_candidates=4, rollout_length=2, num_rollouts=3).chain(PROMPT, HORIZON, Key(0)))
    assert 0.25 <= done.measures["candidate_ess"] <= 1.0
    assert done.proposals == 0
