"""`sampler=power_smc` on the tabular engine: unbiased weights, exact wrappers, and public mistakes that these tests catch."""

import math

import pytest

from dflash_mcmc import kernel
from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.power_smc import PowerSMC
from dflash_mcmc.testing import PROMPT, mean_of, power_target, score
from dflash_mcmc.types import Trajectory
from tests.sampler.stages import step_error

EXACT, WRONG = 1e-11, 1e-3
ENGINE = TabularEngine(TabularModel(3, (0,), seed=4))
SMALL = TabularEngine(TabularModel(2, (0,), seed=4))
"""Its four sequences of at most three tokens allow a look at the weights after each token in a second."""


def make(**changes):
    values = dict(alpha=3.0, num_particles=2, block_size=1, ess_threshold=1.0, temperature=0.6, top_k=0,
                  top_p=1.0, proposal="target", wrapper="none", num_steps=1)
    return PowerSMC(**{**values, **changes})


def weights_of(sampler, engine=ENGINE, horizon=2, within=lambda steps: steps):
    """E[Z 1(result = x)] for every x; `within` takes the steps of the chain."""
    def program(key):
        done = engine.run(within(sampler.chain(PROMPT, horizon, key)))
        return done.trajectory, math.exp(done.measures.get("log_z", -math.inf))

    return mean_of(program)


def error(sampler, engine=ENGINE, horizon=2):
    """The largest deviation of these means from p(x)^alpha, relative to their sum."""
    target = power_target(engine, horizon, sampler.alpha, SamplingParams(), "blended")
    expected = {tokens: math.exp(sampler.alpha * score(engine, tokens, SamplingParams(), "blended").log_p.sum())
                for tokens in target.states}
    found = weights_of(sampler, engine, horizon)
    assert found.keys() == expected.keys()
    return max(abs(found[x] - expected[x]) for x in expected) / sum(expected.values())


@pytest.mark.parametrize("changes", [
    {}, {"ess_threshold": 0.8}, {"temperature": None},
    {"temperature": 1.0, "alpha": 0.5}, {"block_size": 2}, {"num_particles": 1}], ids=str)
def test_the_weights_are_unbiased(changes):
    assert error(make(**changes)) < EXACT
    assert error(make(**changes), SMALL, 3) < EXACT


@pytest.mark.parametrize(("engine", "num_particles"), [
    (TabularEngine(TabularModel(3, (), seed=2, scale=1.5)), 2), (TabularEngine(TabularModel(3, (0, 2), seed=2, scale=1.5)), 2),
    (SMALL, 3), (TabularEngine(TabularModel(3, (0,), seed=7), LayerBlend(beta=0.4, layer=0, norm="final")), 2)],
    ids=["no stop id", "two stop ids", "three particles", "blend"])
def test_the_weights_of_other_engines_are_unbiased(engine, num_particles):
    assert error(make(num_particles=num_particles), engine) < EXACT


@pytest.mark.parametrize("horizon", [2, 3])
def test_the_weights_are_unbiased_with_proposals_of_a_draft(horizon):
    """Tokens 0 and 2 are drawn from the target, since they start blocks of two, and token 1 from the draft."""
    engine = TabularEngine(TabularModel(2, (0,), seed=4), draft=TabularDraft(2, 1, seed=9))
    assert error(make(proposal="draft", temperature=0.8), engine, horizon) < EXACT


@pytest.mark.parametrize("changes", [
    {}, {"block_size": 2}, {"ess_threshold": 0.7}, {"temperature": None}, {"num_particles": 3, "horizon": 2}], ids=str)
@pytest.mark.parametrize("stops", [(0,), ()])
def test_conditional_smc_is_exact(changes, stops):
    changes = dict(changes)
    horizon, engine = changes.pop("horizon", 3), TabularEngine(TabularModel(2, stops, seed=5))
    assert step_error(engine, make(wrapper="csmc", **changes), horizon) < EXACT


def pimh_law(sampler, horizon=2, within=lambda steps: steps):
    """The law of the result of a step of particle-independent MH whose state (result, Z) has its invariant law.

    This law is proportional to Z times the law of a run, so that each branch is weighed by Z. `mean_of` enumerates both runs.
    """
    def program(key):
        def chain():
            cloud = yield from sampler.cloud(Trajectory.start(PROMPT), horizon, key.fold_in("run", 0))
            path = cloud.chosen(key.fold_in("choose", 0))
            step, _ = yield from sampler.independent_step(path, cloud.log_z, horizon, key.fold_in("step", 1))
            return step.trajectory, math.exp(cloud.log_z)

        return SMALL.run(within(chain()))

    mean = mean_of(program)
    return {tokens: value / sum(mean.values()) for tokens, value in mean.items()}


@pytest.mark.parametrize("changes", [{"num_particles": 1}, {}], ids=str)
def test_particle_independent_mh_is_exact(changes):
    sampler = make(wrapper="pimh", **changes)
    target = power_target(SMALL, 2, sampler.alpha, sampler.law(), "blended")
    expected = dict(zip(target.states, target.probability, strict=True))
    law = pimh_law(sampler)
    assert max(abs(law[x] - expected[x]) for x in expected) < EXACT


def test_a_chain_reports_its_runs():
    done = ENGINE.run(make(wrapper="pimh", num_particles=4, num_steps=3).chain(PROMPT, 3, Key(1)))
    assert done.proposals == len(done.trace) == 3
    assert set(done.measures) == {"log_z", "least_ess", "resamplings", "ancestors"}
    assert 0.25 <= done.measures["least_ess"] <= 1.0
    assert done.measures["log_z"] < 0.0


def test_a_chain_that_stays_has_rejected():
    """As with isir, which makes the same choice."""
    chains = [ENGINE.run(make(wrapper="csmc", num_particles=3, num_steps=4, block_size=2).chain(PROMPT, 6, Key(seed)))
              for seed in range(20)]
    decisions = [entry["decision"] for done in chains for entry in done.trace]
    assert {"accept", "reject"} <= set(decisions)
    assert sum(done.accepted for done in chains) == len(decisions) - decisions.count("reject")


def test_ancestors_are_followed_through_every_resampling(monkeypatch):
    """The parents of each resampling, composed by hand."""
    recorded, systematic = list[list[int]](), kernel.systematic
    monkeypatch.setattr(kernel, "systematic", lambda *given: recorded.append(systematic(*given)) or recorded[-1])
    for seed in range(8):
        recorded.clear()
        done = ENGINE.run(make(num_particles=4, temperature=1.0, ess_threshold=0.9).chain(PROMPT, 6, Key(seed)))
        roots = [0, 1, 2, 3]
        for parents in recorded:
            roots = [roots[parent] for parent in parents]
        assert (done.measures["ancestors"], done.measures["resamplings"]) == (len(set(roots)), len(recorded))


def test_each_step_of_pimh_compares_with_the_estimate_of_its_state():
    """A step alone is told log Z of its state. A chain keeps it: that of the latest accepted run."""
    sampler, key, start = make(wrapper="pimh", num_steps=12, ess_threshold=0.6), Key(6), Trajectory.start(PROMPT)
    done = ENGINE.run(sampler.chain(PROMPT, 3, key))
    log_z = ENGINE.run(sampler.cloud(start, 3, key.fold_in("run", 0))).log_z
    for number, entry in enumerate(done.trace, start=1):
        proposed = ENGINE.run(sampler.cloud(start, 3, key.fold_in("step", number, "run"))).log_z
        assert entry["log_ratio"] == pytest.approx(proposed - log_z, abs=1e-12)
        log_z = log_z if entry["decision"] == "reject" else proposed
    assert {"accept", "reject"} <= {entry["decision"] for entry in done.trace}
    assert done.measures["log_z"] == pytest.approx(log_z, abs=1e-12)


def test_one_particle_is_drawn_to_the_end_whatever_the_blocks():
    """Its identity leaves out the fields of blocks: the same identity is the same sample."""
    engine = TabularEngine(TabularModel(5, (0,), seed=4))
    for seed in range(5):
        one, other = (engine.run(make(num_particles=1, block_size=size).chain(PROMPT, 6, Key(seed))) for size in (1, 4))
        assert one.trajectory.tokens.tolist() == other.trajectory.tokens.tolist()
