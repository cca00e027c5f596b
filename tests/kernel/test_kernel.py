"""Decisions and costs by hand; stages whose number does not divide the length: their horizons, and the law of a chain."""

import math

import numpy as np
import pytest

from dflash_mcmc import kernel
from dflash_mcmc.components import registered
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.kernel import decide, doubling, doubling_cost, mh_cost, result, stage_horizon, trace_entry
from dflash_mcmc.rng import Key
from dflash_mcmc.testing import PROMPT, EnumeratedKey, Enumerator, law_of, score, total_variation
from dflash_mcmc.types import ExpectedCost, Trajectory
from tests.cases import quick
from tests.composing import composed
from tests.sampler.stages import extended, matrix_error, step_error, step_matrix, stepped
from tests.sampler.test_power_mh import engine_of, make

EXACT = 1e-12


def path(*tokens: int) -> Trajectory:
    zeros = np.zeros(len(tokens))
    return Trajectory.start(np.array([0])).extended(np.array(tokens), zeros, zeros, np.zeros((len(tokens), 2)), False)


STATE, OTHER = path(1, 2), path(1, 3, 4)


@pytest.mark.parametrize(("log_ratio", "decision"), [
    (-0.9, "accept"), (-1.1, "reject"), (-1.0, "reject"), (0.5, "accept"), (-math.inf, "reject"), (math.nan, "reject")])
def test_a_proposal_is_accepted_where_the_uniform_is_below_the_ratio(log_ratio, decision):
    step = decide(STATE, OTHER, 1, log_ratio, -1.0)
    assert (step.decision, step.cut, step.proposal_length) == (decision, 1, 3)
    assert step.trajectory is (OTHER if decision == "accept" else STATE)


def test_an_equal_proposal_is_accepted_but_does_not_move():
    step = decide(STATE, path(1, 2), 1, 0.0, -1.0)
    assert (step.decision, step.accepted, step.moved) == ("identical", True, False)


def test_the_result_counts_each_decision():
    made = decide(STATE, OTHER, 1, 0.5, -1.0)
    steps = [made, made._replace(decision="identical"), *[made._replace(decision="reject")] * 3,
             *[made._replace(decision="abandon")] * 5]
    found = result(STATE, steps, [{"block": 1}])
    assert (found.proposals, found.accepted, found.moved, found.abandoned) == (10, 2, 1, 5)
    assert found.trace == ({"block": 1},)


def test_the_trace_has_the_length_before_and_log_p_after_a_step():
    step = decide(STATE, OTHER._replace(log_p=np.array([-1.0, -2.0, -4.0])), 1, 0.0, -1.0)
    assert trace_entry(step, 3, 2, STATE.length) == {
        "block": 3, "step": 2, "cut": 1, "length": 2, "proposal_length": 3, "log_ratio": 0.0, "decision": "accept",
        "log_p": -7.0}


def test_stages_that_double():
    assert [doubling(count) for count in (1, 2, 3, 4, 5, 8)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_a_chain_of_two_stages():
    """Stages of 4 and 6 tokens: 3 steps draw 2.5 and 3.5 tokens, after two extensions."""
    found = mh_cost(6.0, 8, 2, 3)
    assert found == ExpectedCost(6.0, 3 * 6.0, 0.0, 2 + 3 * 2)


def test_a_chain_that_stops_with_its_answer():
    found = mh_cost(3.0, 8, 2, 3, stops=True)
    assert found == ExpectedCost(3.0, 3 * 2.0, 0.0, 1 + 3)


def test_a_chain_whose_stages_double():
    """The answer of 3 tokens passes the horizons 1 and 2 of 8, and the last stage is at 8."""
    found = doubling_cost(3.0, 8, 8, 1)
    assert found == ExpectedCost(3.0, 1.0 + 1.5 + 2.0, 0.0, 3 + 3)


STAGED = ["power_mh", "multiple_try", "replica_exchange", "draft_mh", "draft_refine"]


@pytest.mark.parametrize("horizon", [1, 3, 7, 64, 100])
def test_horizons_rise_to_the_full_one(horizon):
    for num_blocks in range(1, horizon + 1):
        found = [stage_horizon(block, num_blocks, horizon) for block in range(num_blocks + 1)]
        assert (found[0], found[-1]) == (0, horizon)
        steps = np.diff(found)
        assert steps.min() >= 1
        assert steps.max() - steps.min() <= 1


@pytest.mark.parametrize("name", STAGED)
def test_a_chain_has_the_full_length(name):
    sampler = registered("sampler")[name].cls(num_blocks=3, num_steps=1)
    engine = TabularEngine(TabularModel(3, (), seed=0), None, None, TabularDraft(3, 2, seed=7))
    assert engine.run(sampler.chain(PROMPT, 5, Key(0))).trajectory.length == 5


def test_the_law_of_two_stages_of_three_tokens():
    """Their horizons are 1 and 3."""
    engine, sampler, law = engine_of(), make(alpha=2.0), {(): 1.0}
    for horizon in (1, 3):
        law = stepped(engine, sampler, extended(engine, sampler, law, horizon), horizon)
    drawn = law_of(lambda key: engine.run(sampler.chain(PROMPT, 3, key)).trajectory)
    assert total_variation(drawn, law) <= EXACT


# Cuts at jumps of the entropy: `power_mh cut=entropy` by enumeration, early rejection.


def entropy_cut(**changes):
    return make(**{"cut": "entropy", "entropy_power": 2.0, "proposal_temperature": 0.5, **changes})


@pytest.mark.parametrize("power", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("stop_ids", [(), (0,), pytest.param((0, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_a_step_leaves_the_power_law_invariant_and_reaches_every_state(power, stop_ids, seed):
    matrix, target = step_matrix(engine_of(stop_ids, seed=seed, scale=1.5), entropy_cut(entropy_power=power), 3)
    assert matrix_error(matrix, target) < EXACT
    assert (np.linalg.matrix_power(matrix, 3) > 0.0).all()


@pytest.mark.parametrize("changes", quick(
    [{"proposal_temperature": None}, {"proposal_temperature": 1.0}, {"alpha": 2.0}], {"alpha": 2.0}), ids=str)
def test_exact_early_rejection_leaves_the_power_law_invariant(changes):
    assert step_error(engine_of(scale=1.5), entropy_cut(early_reject="exact", **changes), 4) < EXACT


def with_entropies(values):
    engine = engine_of(())
    path = score(engine, [0] * len(values), make().law(), "blended")
    return path._replace(entropy=np.array(values))


def test_probabilities_by_hand():
    path = with_entropies([1.0, 3.0, 2.0, 3.0])
    np.testing.assert_allclose(kernel.cut_probabilities(path, 2.0), np.array([1.0, 4.0, 0.0, 1.0]) / 6.0)
    np.testing.assert_allclose(kernel.cut_probabilities(path, 0.0), np.array([1.0, 1.0, 0.0, 1.0]) / 3.0)
    other = with_entropies([1.0, 3.0, 5.0, 0.0])
    assert kernel.EntropyCuts(2.0).log_ratio(path, other, 1) == pytest.approx(math.log(6.0 / 9.0))
    assert kernel.EntropyCuts(2.0).bound(path, 1) == (pytest.approx(math.log(6.0 / 5.0)), None)


def test_a_state_without_jumps_has_uniform_cuts():
    """A model that is certain of all its tokens so far. A proposal with a jump elsewhere is never cut where this one was."""
    flat, rising = with_entropies([0.0, 0.0, 0.0]), with_entropies([0.0, 0.0, 1.0])
    np.testing.assert_allclose(kernel.cut_probabilities(flat, 4.0), [1 / 3] * 3)
    assert kernel.EntropyCuts(4.0).log_ratio(flat, rising, 1) == -math.inf
    assert kernel.EntropyCuts(4.0).log_ratio(flat, with_entropies([0.0, 0.0]), 1) == pytest.approx(math.log(3 / 2))
    assert kernel.EntropyCuts(4.0).bound(flat, 1) == (0.0, 3)


def test_trajectories_without_entropies_are_refused():
    path = with_entropies([1.0])._replace(entropy=None)
    with pytest.raises(ValueError, match="entropies"):
        kernel.cut_probabilities(path, 1.0)


def test_the_power_of_jumps_is_part_of_the_identity_only_with_entropy_cuts(tmp_path):
    from dflash_mcmc.config.identity import identity_of

    plain, other = (identity_of(composed(tmp_path, "sampler=power_mh", f"sampler.entropy_power={power}")) for power in (4, 2))
    assert plain == other
    cut = identity_of(composed(tmp_path, "sampler=power_mh", "sampler.cut=entropy", "sampler.entropy_power=2"))
    assert cut["sampler.entropy_power"] == 2.0


# Weights of particles by hand, and parents that follow their weights.

LOG_WEIGHTS = np.log(np.array([1.0, 3.0, 0.0, 4.0]) + 1e-300)


def test_weights_by_hand():
    assert kernel.log_mean(LOG_WEIGHTS) == pytest.approx(np.log(2.0))
    assert kernel.shares(LOG_WEIGHTS) == pytest.approx([0.125, 0.375, 0.0, 0.5])
    assert kernel.effective_size(LOG_WEIGHTS) == pytest.approx(64.0 / 26.0)
    assert kernel.effective_size(np.full(5, -7.0)) == pytest.approx(5.0)


def test_equal_weights_are_not_low():
    assert not kernel.is_low(np.full(5, np.log(0.1)), 1.0)
    assert kernel.systematic(np.zeros(4), Key(0)) == [0, 1, 2, 3]
    assert kernel.is_low(LOG_WEIGHTS, 0.7)
    assert not kernel.is_low(LOG_WEIGHTS, 0.6)


def systematic(key) -> tuple[int, ...]:
    return tuple(kernel.systematic(LOG_WEIGHTS, key))


def test_systematic_parents_by_hand():
    """N * weights are 0.5, 1.5, 0 and 2, so the points u0 + i give the parents 0133 for u0 below 0.5, else 1133."""
    enumerator, law = Enumerator(), dict[tuple, float]()
    while True:
        parents = systematic(EnumeratedKey(enumerator))
        law[parents] = law.get(parents, 0.0) + enumerator.probability
        if not enumerator.next_branch():
            break
    assert law == {(0, 1, 3, 3): pytest.approx(0.5), (1, 1, 3, 3): pytest.approx(0.5)}


def test_multinomial_parents_never_have_weight_zero():
    parents = kernel.multinomial(LOG_WEIGHTS, 400, Key(0))
    shares = np.bincount(parents, minlength=4) / 400
    assert shares[2] == 0.0
    assert shares == pytest.approx([0.125, 0.375, 0.0, 0.5], abs=0.08)
