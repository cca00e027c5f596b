"""`sampler=multiple_try` on the tabular engine: both forms by enumeration, mistakes that the tests catch, early rejection."""

import numpy as np
import pytest

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.kernel import ROUNDING
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.multiple_try import MultipleTry
from dflash_mcmc.testing import PROMPT, score
from tests.sampler.stages import step_error

EXACT = 1e-12
SMALL = TabularEngine(TabularModel(2, (0,), seed=4))
ENGINE = TabularEngine(TabularModel(3, (0,), seed=4, scale=1.5))
FORMS = ["multiple_try", "isir"]


def make(**changes):
    values = dict(alpha=3.0, form="isir", num_tries=2, proposal_temperature=0.6, num_blocks=1, num_steps=1,
                  early_reject="off", top_k=0, top_p=1.0)
    return MultipleTry(**{**values, **changes})


@pytest.mark.parametrize("changes", [{}, {"num_tries": 1}, {"num_tries": 3}, {"proposal_temperature": None}, {"alpha": 0.5}],
                         ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_leaves_the_power_law_invariant(form, changes):
    assert step_error(SMALL, make(form=form, **changes), 2 if "num_tries" in changes else 3) < EXACT


@pytest.mark.parametrize(("engine", "top_k", "horizon"), [
    *((TabularEngine(TabularModel(3, stops, seed=9, scale=2.0)), 2, 2) for stops in ((), (0, 2))),
    (TabularEngine(TabularModel(2, (0,), seed=7), LayerBlend(beta=0.4, layer=0, norm="final")), 0, 3)],
    ids=["top_k, no stop id", "top_k, two stop ids", "blend"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_exact_with_truncation_other_stop_ids_and_a_blend(form, engine, top_k, horizon):
    assert step_error(engine, make(form=form, top_k=top_k), horizon) < EXACT


def test_the_floor_compares_a_try_with_the_state():
    """A try that is shorter than the state is worth more by log(length / t), which the bound must have."""
    sampler, contest = make(early_reject="exact"), Key(0).contest(3)
    path = score(ENGINE, (1, 2, 1, 0), sampler.law(), "blended")
    floor = sampler._floor(path, 6, 1, contest, 2)
    assert (floor.log_uniform, floor.alpha) == (contest.lead(0, 2), 3.0)
    assert floor.length == 4
    assert floor.margin == pytest.approx(ROUNDING * 3.0 * 5, abs=1e-15)
    assert floor.reference == pytest.approx(3.0 * path.log_p[1:].sum() - path.log_q[1:].sum(), abs=1e-12)
    assert sampler._floor(path, 6, 1, None, 2) is None


@pytest.mark.parametrize(("taken", "any_complete", "outcome"), [
    (2, True, ((2, 1), -3.0, "accept")), (1, True, ((1, 0), -1.0, "identical")),
    (0, True, ((1, 0), -1.0, "reject")), (0, False, ((1, 0), -1.0, "abandon"))])
def test_a_step_of_isir_reports_the_try_that_it_took_or_else_the_best(taken, any_complete, outcome):
    path, *drawn = (score(ENGINE, tokens, make().law(), "blended") for tokens in ((1, 0), (1, 0), (2, 1)))
    step = make()._taken(path, drawn, 1, taken, np.array([0.0, -1.0, -3.0]), any_complete)
    assert (tuple(step.trajectory.tokens.tolist()), step.log_ratio, step.decision) == outcome
    assert step.proposal_length == 2


def test_abandoned_tries_are_a_share():
    """The record has the mean over steps of the share of tries that a step abandoned."""
    engine, seen = TabularEngine(TabularModel(4, (0,), seed=3, scale=2.0)), set()
    for seed in range(20):
        key, sampler = Key(seed), make(alpha=4.0, proposal_temperature=1.0, num_tries=3, early_reject="exact")
        done = engine.run(sampler.chain(PROMPT, 8, key))
        path = engine.run(make(alpha=4.0, proposal_temperature=1.0, num_steps=0).chain(PROMPT, 8, key)).trajectory
        abandoned = engine.run(sampler.step(path, 8, key.fold_in("block", 1, "step", 1))).lost
        assert done.measures["abandoned_tries"] == pytest.approx(abandoned / 3)
        seen.add(abandoned)
    assert len(seen) >= 3
