"""`dataset.must_end` on the tabular engine: the law of every sampler has only answers that end, by enumeration."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from dflash_mcmc.chains import build
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.kernel import MetropolisStep
from dflash_mcmc.ops import UNENDED, Draw, SamplingParams, Steps, drive, ended_only, until_ended
from dflash_mcmc.rng import Key
from dflash_mcmc.testing import PROMPT, Target, law_of, score, total_variation, transition_matrix
from dflash_mcmc.types import ChainResult, Trajectory
from tests.laws import power_law, product_law, stopped
from tests.sampler import (
    test_best_of_n as of_best_of_n,
    test_draft_mh as of_draft_mh,
    test_draft_refine as of_draft_refine,
    test_lookahead as of_lookahead,
    test_multiple_try as of_multiple_try,
    test_power_mh as of_power_mh,
    test_power_smc as of_power_smc,
    test_replica_exchange as of_replica_exchange,
    test_stop_strings as of_stop_strings,
    test_temperature as of_temperature,
)
from tests.sampler.stages import matrix_error

EXACT, WRONG = 1e-11, 1e-3
MODEL = TabularModel(2, (0,), seed=4)
STRINGS = of_stop_strings.pair().model
"""Two tokens and the string "ab", which can end an answer at its last token too."""


def ended(model: TabularModel, law: dict) -> dict:
    """A law, given that an answer ends."""
    share = {tokens: p for tokens, p in law.items() if stopped(model, tokens)}
    return {tokens: p / sum(share.values()) for tokens, p in share.items()}


def ended_target(model: TabularModel, horizon: int, alpha: float) -> Target:
    """The power law, given that an answer ends."""
    law = ended(model, power_law(model, horizon, alpha, product_law(model, horizon)))
    return Target(list(law), np.array(list(law.values())))


class Ended(NamedTuple):
    """The kernel of a sampler, on answers that end."""

    sampler: Any

    def law(self) -> SamplingParams:
        return self.sampler.law()

    def source(self) -> str:
        return self.sampler.source()

    def step(self, path: Trajectory, horizon: int, key: Any) -> Steps[MetropolisStep]:
        return ended_only(self.sampler.step(path, horizon, key), horizon)


def step_error(engine: TabularEngine, sampler: Any, horizon: int = 3) -> float:
    """The largest violation of invariance and balance, for the law of the definition. Every step stays on ended answers."""
    target = ended_target(engine.model, horizon, sampler.alpha)
    return matrix_error(transition_matrix(engine, Ended(sampler), horizon, target), target)


KERNELS = {
    **{f"power_mh {name}": of_power_mh.make(**options) for name, options in of_stop_strings.POWER_MH.items()},
    **{f"multiple_try {form}": of_multiple_try.make(form=form) for form in of_multiple_try.FORMS},
    "csmc": of_power_smc.make(wrapper="csmc"),
    "draft_mh": of_draft_mh.make(), "draft_mh mixture": of_draft_mh.make(proposal="mixture"),
    "draft_refine": of_draft_refine.make(), "draft_refine confidence": of_draft_refine.make(cut="confidence"),
}


@pytest.mark.parametrize("model", [MODEL, STRINGS], ids=["stop id", "stop string"])
@pytest.mark.parametrize("sampler", KERNELS.values(), ids=KERNELS)
def test_a_step_keeps_the_power_law_of_answers_that_end(sampler, model):
    engine = TabularEngine(model, draft=TabularDraft(2, 2, seed=7) if sampler.needs_draft else None)
    assert step_error(engine, sampler) <= EXACT


def test_every_step_from_an_answer_without_an_end_takes_one_that_ends():
    """The rule before the first ended state: the first proposal that ends is accepted."""
    engine, sampler = TabularEngine(MODEL), of_power_mh.make()
    start = score(engine, (1, 1, 1), sampler.law(), "base")
    law = law_of(lambda key: engine.run(ended_only(sampler.step(_cut_off(start), 3, key), 3)).trajectory)
    q = product_law(MODEL, 3, temperature=0.25)
    after = [sum(p for tokens, p in q.items() if tokens[:cut] == (1,) * cut and tokens != (1, 1, 1))
             / sum(p for tokens, p in q.items() if tokens[:cut] == (1,) * cut) for cut in range(3)]
    assert 1.0 - law[1, 1, 1] == pytest.approx(sum(after) / 3, abs=EXACT)


def _cut_off(path: Trajectory) -> Trajectory:
    return path._replace(log_p=np.append(path.log_p[:-1], path.log_p[-1] - UNENDED))


def test_a_round_of_replica_exchange():
    """The product of the powers on ended answers, of which a round reaches no other."""
    engine, sampler = TabularEngine(MODEL), of_replica_exchange.make()
    targets = [ended_target(MODEL, 2, alpha) for alpha in sampler.alphas]
    assert of_replica_exchange.joint_error(engine, sampler, 2, lambda sampler, ladder, key: engine.run(
        ended_only(sampler.round(ladder, 2, key), 2)), targets) <= EXACT


def test_a_swap_takes_an_answer_that_ends_to_the_higher_power():
    engine, sampler = TabularEngine(MODEL), of_replica_exchange.make()
    ladder = of_replica_exchange.rungs_at(engine, sampler, [(1, 0), (1, 1)])
    cut_off = ladder._replace(paths=(ladder.paths[0], _cut_off(ladder.paths[1])))
    assert all(sampler.swap(cut_off, Key(seed))[1] == (True,) for seed in range(50))
    other = cut_off._replace(paths=cut_off.paths[::-1])
    assert not any(sampler.swap(other, Key(seed))[1] == (True,) for seed in range(50))


@pytest.mark.parametrize("changes", [{}, {"block_size": 2}], ids=str)
@pytest.mark.parametrize("model", [MODEL, STRINGS], ids=["stop id", "stop string"])
def test_the_weights_of_particles_are_unbiased(changes, model):
    """E[Z 1(result = x)] is p(x)^alpha for answers that end, and 0 for the others."""
    sampler = of_power_smc.make(**changes)
    expected = {tokens: p ** sampler.alpha for tokens, p in product_law(model, 3).items() if stopped(model, tokens)}
    found = of_power_smc.weights_of(sampler, TabularEngine(model), 3, lambda steps: ended_only(steps, 3))
    assert max(abs(found[tokens] - expected.get(tokens, 0.0)) for tokens in found) <= EXACT * sum(expected.values())
    assert expected.keys() <= found.keys()


def test_particle_independent_steps():
    """State (answer, Z): its invariant law is that of a run, weighed by Z, and a step keeps the law of the answer."""
    law = of_power_smc.pimh_law(of_power_smc.make(wrapper="pimh"), 2, lambda steps: ended_only(steps, 2))
    assert total_variation(law, ended(MODEL, power_law(MODEL, 2, 3.0, product_law(MODEL, 2)))) <= EXACT


def again(sampler: Any, model: TabularModel, horizon: int, most: int) -> tuple[dict, float]:
    """The law of `until_ended` given that a try ends, and the probability that none does, which has a law error of 1."""
    engine = TabularEngine(model)

    def program(key):
        done = engine.run(until_ended(lambda each: sampler.chain(PROMPT, horizon, each), horizon, key, most))
        assert done.law_error == (not done.trajectory.ended)
        return done.trajectory

    law = law_of(program)
    return ended(model, law), sum(p for tokens, p in law.items() if not stopped(model, tokens))


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("model", [MODEL, STRINGS], ids=["stop id", "stop string"])
def test_temperature_is_drawn_until_it_ends(model, most):
    law, missed = again(of_temperature.make(), model, 3, most)
    once = product_law(model, 3, temperature=0.5)
    assert total_variation(law, ended(model, once)) <= EXACT
    assert missed == pytest.approx(sum(p for tokens, p in once.items() if not stopped(model, tokens)) ** most, abs=EXACT)


@pytest.mark.parametrize("select", of_best_of_n.SELECTS)
def test_best_of_n_weighs_the_candidates_that_end(select):
    """By hand: the sum over all pairs of candidates of which one ends."""
    q, p = product_law(MODEL, 2, temperature=0.8), product_law(MODEL, 2)
    expected = of_best_of_n.by_hand(q, p, select, 2, counts=lambda y: stopped(MODEL, y))
    law, _ = again(of_best_of_n.make(select=select, num_candidates=2), MODEL, 2, 1)
    assert total_variation(law, {y: p / sum(expected.values()) for y, p in expected.items()}) <= EXACT


@pytest.mark.parametrize("answer_of", [len, lambda tokens: 0, lambda tokens: int(tokens[-1])])
def test_a_vote_keeps_a_candidate_that_ends(answer_of):
    """Where one of three candidates ends, however their answers compare."""
    sampler, engine = of_best_of_n.make(select="vote", num_candidates=3, confidence=0.99), TabularEngine(MODEL)
    out = sum(share for tokens, share in product_law(MODEL, 2, temperature=0.8).items() if not stopped(MODEL, tokens))
    law = law_of(lambda key: engine.run(ended_only(sampler.comparing(PROMPT, 2, key, answer_of), 2)).trajectory)
    assert sum(share for tokens, share in law.items() if not stopped(MODEL, tokens)) == pytest.approx(out**3, abs=EXACT)


def test_lookahead_to_the_end_prefers_candidates_whose_rollouts_end():
    """With rollouts to the end of the answer, an answer without an end has weight 0 beside one that ends."""
    sampler = of_lookahead.make(num_candidates=2, num_rollouts=1, rollout_length=2, block_size=1)
    engine = TabularEngine(MODEL)
    plain = law_of(lambda key: engine.run(sampler.chain(PROMPT, 2, key)).trajectory)
    law = law_of(lambda key: engine.run(ended_only(sampler.chain(PROMPT, 2, key), 2)).trajectory)
    assert law[1, 1] < 0.7 * plain[1, 1]


def test_without_an_end_the_last_try_has_its_own_log_p():
    """A model that never ends: the result is that of the last key, with the log p and the trace of the model."""
    model = TabularModel(2, (), seed=4)
    sampler = of_power_mh.make(num_steps=3)
    done = TabularEngine(model).run(until_ended(lambda key: sampler.chain(PROMPT, 4, key), 4, Key(1), 3))
    plain = TabularEngine(model).run(sampler.chain(PROMPT, 4, Key(1).fold_in("again", 2)))
    assert done.trajectory.tokens.tolist() == plain.trajectory.tokens.tolist()
    assert (done.law_error, plain.law_error) == (1.0, 0.0)
    np.testing.assert_allclose(done.trajectory.log_p, plain.trajectory.log_p, atol=1e-6)
    assert [entry["log_p"] for entry in done.trace] == pytest.approx([entry["log_p"] for entry in plain.trace], abs=1e-5)


def test_an_answer_that_is_repeated_is_not_lowered_twice():
    def chain() -> Steps[ChainResult]:
        first = yield Draw(Trajectory.start(PROMPT), 2, SamplingParams(), Key(0))
        return ChainResult(first)

    path = _cut_off(score(TabularEngine(MODEL), (1, 1), SamplingParams(), "base"))
    steps = ended_only(chain(), 2)
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(path)
    assert end.value.value.trajectory.log_p.tolist() == path.log_p.tolist()


def test_a_run_has_the_chain_of_its_configuration(make_config):
    config = make_config("sampler=temperature", "dataset.max_new_tokens=2", "dataset.must_end=true")
    engine, prompt = TabularEngine(TabularModel(2, (), seed=4)), np.array([0])
    assert engine.run(build.chain(config, config.sampler, "a", 0, prompt, None)).law_error == 1.0
    config.dataset.must_end = False
    assert engine.run(build.chain(config, config.sampler, "a", 0, prompt, None)).law_error == 0.0


def test_an_answer_is_drawn_sixteen_times_at_most(make_config):
    config, draws = make_config("sampler=temperature", "dataset.max_new_tokens=2", "dataset.must_end=true"), []
    path = score(TabularEngine(MODEL), (1, 1), SamplingParams(), "base")
    done = drive(build.chain(config, config.sampler, "a", 0, PROMPT, None), lambda draw: draws.append(draw.key) or path)
    assert (len(set(draws)), done.law_error) == (16, 1.0)


def test_a_vote_without_answers_keeps_the_first_draw_that_ends():
    engine, vote = TabularEngine(MODEL), of_best_of_n.make(select="vote", num_candidates=3)
    paths = [score(engine, tokens, SamplingParams(), "base") for tokens in ((1, 1), (1, 0), (0,))]
    drawn = iter([_cut_off(paths[0]), *paths[1:]])
    done = drive(vote.comparing(PROMPT, 2, Key(0), lambda tokens: None), lambda _: next(drawn))
    assert done.trajectory.tokens.tolist() == [1, 0]


@pytest.mark.parametrize(("overrides", "said"), [
    (("sampler=greedy",), "false with sampler=greedy, which draws the same answer again"),
    (("sampler.rule=published",), "false with sampler.rule=published, whose ratio leaves out the end of the longer answer"),
    (("probe=difficulty", "draft=tiny"), "False with probe=difficulty"),
], ids=str)
def test_what_cannot_be_restricted_is_refused(make_config, overrides, said):
    with pytest.raises(ConfigError) as caught:
        make_config("dataset.must_end=true", *overrides)
    assert str(caught.value).startswith(f"dataset.must_end: given True; allowed: {said}")
