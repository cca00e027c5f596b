"""Potentials on the tabular engine: the law of every sampler is p^alpha exp(beta r) on complete answers, by enumeration."""

import math
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import pytest

from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.kernel import MetropolisStep
from dflash_mcmc.ops import Draw, Evaluated, SamplingParams, Steps, Tilt, ended_only, tilted
from dflash_mcmc.rng import Key
from dflash_mcmc.testing import PROMPT, Target, law_of, mean_of, total_variation, transition_matrix
from dflash_mcmc.types import Trajectory
from tests.laws import power_law, product_law, stopped
from tests.sampler import (
    test_best_of_n as of_best_of_n,
    test_draft_mh as of_draft_mh,
    test_draft_refine as of_draft_refine,
    test_multiple_try as of_multiple_try,
    test_power_mh as of_power_mh,
    test_power_smc as of_power_smc,
    test_replica_exchange as of_replica_exchange,
)
from tests.sampler.stages import extended, matrix_error

EXACT, HORIZON, BETA = 1e-11, 3, 1.7
MODEL = TabularModel(2, (0,), seed=4)
DRAFT = TabularDraft(2, 2, seed=7)


def r(tokens: tuple[int, ...]) -> float:
    """A potential from 0 to 1 of a complete answer."""
    return (3 * sum(tokens) + 2 * len(tokens)) % 5 / 4


def tilt_of(**changes: Any) -> Tilt:
    def evaluate(tokens: np.ndarray) -> Future[Evaluated]:
        done = Future[Evaluated]()
        done.set_result(Evaluated(r(tuple(tokens.tolist())), 0.5))
        return done

    return Tilt(BETA, evaluate, (0.0, 1.0))._replace(**changes)


def weighed(alpha: float, horizon: int, must_end: bool = False) -> dict:
    """The law of the definition at the horizon of a stage: an answer that could go on has r = 0."""
    law = {tokens: p * math.exp(BETA * r(tokens) if stopped(MODEL, tokens) or len(tokens) == HORIZON else 0.0)
           for tokens, p in power_law(MODEL, horizon, alpha, product_law(MODEL, horizon)).items()
           if stopped(MODEL, tokens) or not must_end}
    return {tokens: weight / sum(law.values()) for tokens, weight in law.items()}


class Tilted(NamedTuple):
    """The kernel of a sampler on the target with a potential."""

    sampler: Any
    must_end: bool = False

    def law(self) -> SamplingParams:
        return self.sampler.law()

    def source(self) -> str:
        return self.sampler.source()

    def step(self, path: Trajectory, horizon: int, key: Any) -> Steps[MetropolisStep]:
        tokens = tuple(path.tokens.tolist())
        path = path._replace(evidence=BETA * r(tokens) if path.ended or path.length == HORIZON else 0.0)
        step = tilted(self.sampler.step(path, horizon, key), tilt_of(), HORIZON)
        return ended_only(step, horizon) if self.must_end else step


KERNELS = {
    "power_mh": of_power_mh.make(alpha=3.0), "power_mh entropy": of_power_mh.make(cut="entropy"),
    "power_mh exact": of_power_mh.make(early_reject="exact", proposal_temperature=0.5),
    "isir": of_multiple_try.make(), "mtm": of_multiple_try.make(form="multiple_try"),
    "csmc": of_power_smc.make(wrapper="csmc"),
    "draft_mh": of_draft_mh.make(), "draft_mh mixture": of_draft_mh.make(proposal="mixture"),
    "draft_refine": of_draft_refine.make(),
}


@pytest.mark.parametrize(("horizon", "must_end"), [(HORIZON, False), (2, False), (HORIZON, True)],
                         ids=["full", "stage", "must_end"])
@pytest.mark.parametrize("sampler", KERNELS.values(), ids=KERNELS)
def test_a_step_keeps_the_law(sampler, horizon, must_end):
    engine = TabularEngine(MODEL, draft=DRAFT if sampler.needs_draft else None)
    law = weighed(sampler.alpha, horizon, must_end)
    target = Target(list(law), np.array(list(law.values())))
    matrix = transition_matrix(engine, Tilted(sampler, must_end), horizon, target)
    assert matrix_error(matrix, target) <= EXACT


@pytest.mark.parametrize("sampler", [of_power_mh.make(num_blocks=1, num_steps=2), of_power_mh.make(num_blocks=3, num_steps=1)],
                         ids=str)
def test_a_chain_is_its_draws_and_steps(sampler):
    """Stages of a chain: the extension by q, and the steps of each stage, whose states keep their own evidence."""
    engine, law = TabularEngine(MODEL), {(): 1.0}
    found = law_of(lambda key: engine.run(tilted(sampler.chain(PROMPT, HORIZON, key), tilt_of(), HORIZON)).trajectory)
    for block in range(1, sampler.num_blocks + 1):
        reach = block * HORIZON // sampler.num_blocks
        law = extended(engine, sampler, law, reach)
        states = list(weighed(4.0, reach))
        matrix = transition_matrix(engine, Tilted(sampler), reach, Target(states, np.ones(len(states))))
        row = np.array([law[state] for state in states])
        for _ in range(sampler.num_steps):
            row = row @ matrix
        law = dict(zip(states, row, strict=True))
    assert total_variation(found, law) <= EXACT


@pytest.mark.parametrize("changes", [{}, {"block_size": 2}], ids=str)
def test_the_weights_of_particles_are_unbiased(changes):
    """E[Z 1(result = x)] is p(x)^alpha exp(beta r(x))."""
    engine, sampler = TabularEngine(MODEL), of_power_smc.make(**changes)

    def program(key):
        done = engine.run(tilted(sampler.chain(PROMPT, HORIZON, key), tilt_of(), HORIZON))
        return done.trajectory, math.exp(done.measures["log_z"])

    expected = {tokens: p ** sampler.alpha * math.exp(BETA * r(tokens)) for tokens, p in product_law(MODEL, HORIZON).items()}
    found = mean_of(program)
    assert max(abs(found[tokens] - weight) for tokens, weight in expected.items()) <= EXACT * sum(expected.values())


@pytest.mark.slow
def test_a_round_of_replica_exchange():
    """Every rung has the factor, which a swap leaves out."""
    engine, sampler = TabularEngine(MODEL), of_replica_exchange.make()
    before, after = {}, {}
    for one, p in weighed(sampler.alphas[0], HORIZON).items():
        for two, q in weighed(sampler.alphas[1], HORIZON).items():
            ladder = of_replica_exchange.rungs_at(engine, sampler, [one, two])
            ladder = ladder._replace(paths=tuple(path._replace(evidence=BETA * r(tuple(path.tokens.tolist())))
                                                 for path in ladder.paths))
            before[tuple(of_replica_exchange.joint(ladder).tokens.tolist())] = p * q
            moved = law_of(lambda key, ladder=ladder: of_replica_exchange.joint(
                engine.run(tilted(sampler.round(ladder, HORIZON, key), tilt_of(), HORIZON))))
            for reached, chance in moved.items():
                after[reached] = after.get(reached, 0.0) + p * q * chance
    assert total_variation(before, after) <= EXACT


@pytest.mark.parametrize("select", ["power", "log_p", "mean_log_p"])
def test_best_of_n(select):
    """By hand: the sum over all pairs of candidates."""
    q, p = product_law(MODEL, HORIZON, temperature=0.8), product_law(MODEL, HORIZON)
    expected = dict.fromkeys(q, 0.0)
    for one in q:
        for two in q:
            if select == "power":
                weights = [p[y] ** 4 / q[y] * math.exp(BETA * r(y)) for y in (one, two)]
            else:
                keys = [(r(y), math.log(p[y]) / (len(y) if select == "mean_log_p" else 1)) for y in (one, two)]
                weights = [float(place == keys.index(max(keys))) for place in range(2)]
            for y, weight in zip((one, two), weights, strict=True):
                expected[y] += q[one] * q[two] * weight / sum(weights)
    sampler, engine = of_best_of_n.make(select=select, num_candidates=2), TabularEngine(MODEL)
    law = law_of(lambda key: engine.run(tilted(sampler.chain(PROMPT, HORIZON, key), tilt_of(), HORIZON)).trajectory)
    assert total_variation(law, expected) <= EXACT


def test_a_chain_that_stops_at_the_largest_potential_ends_with_the_first_such_answer():
    sampler, engine, q = of_best_of_n.make(select="log_p"), TabularEngine(MODEL), product_law(MODEL, HORIZON, temperature=0.8)
    best, calls = {tokens for tokens in q if r(tokens) == 1.0}, list[float]()

    def program(key):
        done = engine.run(tilted(sampler.chain(PROMPT, HORIZON, key), tilt_of(stop_at_max=True), HORIZON))
        calls.append(done.measures["potential_calls"])
        return done.trajectory

    law = law_of(program)
    share = sum(q[tokens] for tokens in best)
    assert sum(law[tokens] for tokens in best) == pytest.approx(1.0 - (1.0 - share) ** 3, abs=EXACT)
    assert {1.0, 3.0} <= {*calls}


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "options"), [
    (of_power_mh, {"proposal_temperature": 0.5}), (of_multiple_try, {"proposal_temperature": 0.9}),
    (of_replica_exchange, {"alphas": [2.0, 6.0], "temperatures": [0.9, 0.9]})])
def test_early_rejection_changes_no_decision(sampler, options):
    """With bounds; without them nothing is abandoned."""
    model = TabularModel(3, (0,), seed=1, scale=1.5)
    engine, abandoned = TabularEngine(model), 0
    for seed in range(60):
        chains = [sampler.make(**options, num_steps=4, early_reject=early).chain(PROMPT, 6, Key(seed))
                  for early in ("off", "exact", "exact")]
        tilts = tilt_of(), tilt_of(), tilt_of(bounds=None)
        off, exact, unbounded = (engine.run(tilted(chain, tilt, 6)) for chain, tilt in zip(chains, tilts, strict=True))
        assert off.trajectory.tokens.tolist() == exact.trajectory.tokens.tolist() == unbounded.trajectory.tokens.tolist()
        assert unbounded.measures.get("abandoned_tries", unbounded.abandoned) == 0
        abandoned += exact.measures.get("abandoned_tries", exact.abandoned)
    assert abandoned


def test_an_answer_is_rated_once_and_costs_are_counted():
    """A proposal that repeats a state asks for nothing; a draw that was not complete has no evidence."""
    asked = list[tuple[int, ...]]()

    def evaluate(tokens: np.ndarray) -> Future[Evaluated]:
        asked.append(tuple(tokens.tolist()))
        done = Future[Evaluated]()
        done.set_result(Evaluated(1.0, 0.5, failed=len(tokens) == HORIZON))
        return done

    sampler = of_power_mh.make(num_blocks=3, num_steps=6)
    for seed in range(20):
        asked.clear()
        done = TabularEngine(MODEL).run(tilted(sampler.chain(PROMPT, HORIZON, Key(seed)), tilt_of(evaluate=evaluate), HORIZON))
        assert len({*asked}) == len(asked)
        assert all(tokens[-1] == 0 or len(tokens) == HORIZON for tokens in asked)
        assert done.measures == {"potential": 1.0, "potential_calls": len(asked), "potential_seconds": 0.5 * len(asked),
                                 "potential_failures": sum(len(tokens) == HORIZON for tokens in asked)}


def test_a_shorter_or_a_longer_trajectory_has_no_evidence():
    path = TabularEngine(MODEL).answer(Draw(Trajectory.start(PROMPT), 2, SamplingParams(), Key(5)))._replace(evidence=2.0)
    assert (path.prefix(path.length).evidence, path.prefix(path.length - 1).evidence) == (2.0, 0.0)
    one = np.zeros(1)
    assert path.extended(np.array([1]), one, one, np.zeros((1, 2)), False).evidence == 0.0
    assert path.weight(3.0) == pytest.approx(3.0 * path.log_p.sum() - path.log_q.sum() + 2.0)
