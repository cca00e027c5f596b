"""`sampler=replica_exchange` on the tabular engine: the joint law by enumeration, and mistakes that these tests catch."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.kernel import ROUNDING
from dflash_mcmc.ops import Score
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.replica_exchange import ReplicaExchange, Rungs
from dflash_mcmc.testing import PROMPT, law_of, power_target, product_target, score, total_variation
from dflash_mcmc.types import Trajectory
from tests.cases import quick

EXACT = 1e-12
TWO = TabularEngine(TabularModel(2, (0,), seed=4))
THREE = TabularEngine(TabularModel(3, (0,), seed=4, scale=1.5))
_END = -1
"""Separates the rungs' tokens in a joint state."""


def make(**changes):
    values = dict(alphas=[1.0, 3.0], temperatures=[0.9, 0.5], output=-1, num_blocks=1, num_steps=1,
                  early_reject="off")
    return ReplicaExchange(**{**values, **changes})


def rungs_at(engine, sampler, states):
    """The ladder whose rungs have these tokens."""
    laws = sampler.laws()
    paths = tuple(engine.answer(Score(Trajectory.start(PROMPT), np.array(tokens, dtype=np.int64), laws[0], laws=laws))
                  for tokens in states)
    return Rungs(paths, tuple(range(len(paths))))


def joint(rungs):
    return SimpleNamespace(tokens=np.array([token for path in rungs.paths for token in (*path.tokens.tolist(), _END)]))


def joint_error(engine, sampler, horizon, move, targets=None):
    """Total variation between the joint law and the joint law after `move(sampler, rungs, key)`."""
    targets = targets or [power_target(engine, horizon, alpha, law, "blended")
                          for alpha, law in zip(sampler.alphas, sampler.laws(), strict=True)]
    before, after = {}, {}
    for rungs in itertools.product(*(zip(target.states, target.probability, strict=True) for target in targets)):
        start = rungs_at(engine, sampler, [state for state, _ in rungs])
        share = float(np.prod([probability for _, probability in rungs]))
        before[tuple(joint(start).tokens.tolist())] = share
        for reached, chance in law_of(lambda key, start=start: joint(move(sampler, start, key))).items():
            after[reached] = after.get(reached, 0.0) + share * chance
    assert after.keys() <= before.keys()
    return 0.5 * sum(abs(after.get(state, 0.0) - share) for state, share in before.items())


def round_of(engine, horizon):
    return lambda sampler, rungs, key: engine.run(sampler.round(rungs, horizon, key))


def swaps(sampler, rungs, key):
    return sampler.swap(rungs, key)[0]


@pytest.mark.parametrize("changes", quick([
    {}, {"temperatures": None}, {"temperatures": None, "early_reject": "exact"}, {"alphas": [0.5, 2.0]},
    {"alphas": [1.0, 6.0]}], {}), ids=str)
def test_a_round_leaves_the_product_of_powers_invariant(changes):
    for horizon in (2, 3):
        assert joint_error(TWO, make(**changes), horizon, round_of(TWO, horizon)) < EXACT


@pytest.mark.parametrize("stops", [(), (0,), (0, 2)])
def test_ordered_swaps_of_three_rungs_are_exact(stops):
    engine = TabularEngine(TabularModel(3, stops, seed=2, scale=1.5))
    assert joint_error(engine, make(alphas=[1.0, 2.0, 4.0], temperatures=None), 2, swaps) < EXACT


def test_a_round_is_exact_under_a_blend():
    engine = TabularEngine(TabularModel(2, (0,), seed=7), LayerBlend(beta=0.4, layer=0, norm="final"))
    assert joint_error(engine, make(), 2, round_of(engine, 2)) < EXACT


def swap_and_step(sampler, rungs, key):
    """Swaps before the local steps, so that the steps can see log q that a swap has left wrong."""
    rungs, _ = sampler.swap(rungs, key.fold_in("swap"))
    return TWO.run(sampler.local_step(rungs, 3, key))[0]


def test_a_local_step_after_a_swap_is_exact():
    assert joint_error(TWO, make(), 3, swap_and_step) < EXACT


@pytest.mark.parametrize("rung", [1, 2])
def test_each_rung_starts_at_its_own_law(rung):
    sampler = make(num_steps=0, num_blocks=2, output=rung)
    law = law_of(lambda key: THREE.run(sampler.chain(PROMPT, 2, key)).trajectory)
    assert total_variation(law, product_target(THREE, 2, sampler.laws()[rung - 1])) < EXACT


def test_a_swap_carries_states_with_their_origin():
    """Swaps of three rungs: both pairs, one of them, and none."""
    sampler, seen = make(alphas=[1.0, 2.0, 4.0], temperatures=None), set()
    orders = {(True, True): (1, 2, 0), (True, False): (1, 0, 2), (False, True): (0, 2, 1), (False, False): (0, 1, 2)}
    for seed, states in itertools.product(range(8), itertools.permutations([(1, 2), (2, 1), (0,)])):
        ladder = rungs_at(THREE, sampler, states)
        swapped, accepted = sampler.swap(ladder, Key(seed))
        assert swapped.born == orders[accepted]
        assert all(path is ladder.paths[rung] for path, rung in zip(swapped.paths, orders[accepted], strict=True))
        seen.add(accepted)
    assert seen == set(orders)


def test_a_state_that_stays_keeps_its_origin():
    sampler, moved = make(), set()
    for seed in range(20):
        ladder = rungs_at(THREE, sampler, [(1, 2), (2, 1)])._replace(born=(1, 0))
        after, steps = THREE.run(sampler.local_step(ladder, 2, Key(seed)))
        assert after.born == tuple(rung if step.moved else 1 - rung for rung, step in enumerate(steps))
        moved |= {step.moved for step in steps}
    assert moved == {True, False}


def test_a_state_that_is_extended_has_the_rung_that_extends_it():
    ladder = rungs_at(THREE, sampler := make(), [(1, 2), (0,)])._replace(born=(1, 0))  # the second one has ended
    assert THREE.run(sampler._extend(ladder, 4, Key(0))).born == (0, 0)


def test_a_result_has_log_q_of_the_output_rung():
    """A state that was drawn on another rung too."""
    for output in (1, 2):
        sampler, foreign = make(output=output), 0
        for seed in range(20):
            done = THREE.run(sampler.chain(PROMPT, 3, Key(seed)))
            expected = score(THREE, done.trajectory.tokens, sampler.law(), "blended")
            np.testing.assert_allclose(done.trajectory.log_q, expected.log_q, atol=1e-12)
            foreign += done.measures["born"] != output
        assert foreign > 0


def test_the_floor_of_a_rung_by_hand():
    sampler = make(early_reject="exact", temperatures=None)
    path = score(THREE, (1, 2, 1, 0), sampler.laws()[1], "blended")
    floor = sampler.moves()[1].floor(path, 6, 2, -0.5)
    assert (floor.log_uniform, floor.alpha, floor.length) == (-0.5, 3.0, 4)
    assert floor.margin == pytest.approx(ROUNDING * 3.0 * 4, abs=1e-15)
    assert floor.reference == pytest.approx(3.0 * path.log_p[2:].sum() - path.log_q[2:].sum(), abs=1e-12)


def test_the_record_has_swap_rates_and_round_trips():
    done = THREE.run(make(alphas=[1.0, 2.0, 4.0], temperatures=None, num_steps=30).chain(PROMPT, 4, Key(2)))
    assert set(done.measures) == {"swaps_1_2", "swaps_2_3", "round_trips", "born"}
    assert 0.0 < done.measures["swaps_1_2"] <= 1.0
    assert done.measures["round_trips"] >= 1
    assert done.measures["born"] in (1, 2, 3)
    assert done.proposals == len(done.trace) == 90
    assert {entry["rung"] for entry in done.trace} == {1, 2, 3}
    near = THREE.run(make(alphas=[1.0, 1.01, 9.0], temperatures=None, num_steps=30).chain(PROMPT, 4, Key(2))).measures
    assert near["swaps_1_2"] > 0.9 > near["swaps_2_3"]


UP, DOWN, BOTH, STAY = (True, False), (False, True), (True, True), (False, False)
"""Accepted swaps of three rungs: of the first pair, of the second one, of both and of none."""


@pytest.mark.parametrize("rounds", [
    [(UP, 0), (DOWN, 0), (DOWN, 0), (UP, 1), (BOTH, 1)], [(STAY, 0), (DOWN, 0), (UP, 0)],
    [(BOTH, 0), (DOWN, 0), (UP, 1), (STAY, 1), (BOTH, 1), (DOWN, 1), (UP, 2)]],
    ids=["up and back", "from the last rung", "twice"])
def test_a_round_trip_needs_both_ends(rounds):
    """The replica of the first rung goes up and back; one that starts on the last rung has not been below."""
    from dflash_mcmc.sampler.replica_exchange import _Replicas

    replicas = _Replicas(3)
    for swapped, trips in rounds:
        replicas.swap(swapped)
        assert replicas.round_trips == trips, swapped
