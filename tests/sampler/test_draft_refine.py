"""`sampler=draft_refine` on the tabular engine: steps keep the power target, the chain starts at the draft."""

import math

import numpy as np
import pytest

from dflash_mcmc.blend.draft import DraftBlend
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.kernel import ROUNDING
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.draft_refine import DraftRefine
from dflash_mcmc.testing import PROMPT, law_of, product_target, score, total_variation
from tests.sampler.stages import step_error, step_matrix

EXACT = 1e-12
BLEND = DraftBlend(beta=0.4)
HORIZON = 3


def make(**changes) -> DraftRefine:
    return DraftRefine(**{"num_blocks": 1, "num_steps": 1, **changes})


def engine(blend=None, scale=0.5) -> TabularEngine:
    return TabularEngine(TabularModel(3, (0,), seed=0, scale=scale), blend, None, TabularDraft(3, 2, seed=7, scale=0.7))


CUTS = {"current": {}, "confidence": {"cut": "confidence"},
        "confidence_warm": {"cut": "confidence", "proposal_temperature": 0.6, "alpha": 2.0},
        "confidence_mild": {"cut": "confidence", "alpha": 1.5, "proposal_temperature": 1.0},
        "hot": {"proposal_temperature": 1.5, "alpha": 0.8}}


@pytest.mark.parametrize(("name", "blend"), [*((name, None) for name in CUTS), ("confidence", BLEND)])
def test_a_step_leaves_the_power_target_invariant(name, blend):
    assert step_error(engine(blend), make(**CUTS[name]), HORIZON) <= EXACT


@pytest.mark.parametrize(("early", "temperature", "rejects"), [
    ("auto", 1.0, True), ("auto", None, True), ("auto", 1.5, False), ("auto", 0.2, False), ("exact", 1.0, True),
    ("off", 1.0, False)])
def test_auto_rejects_early_only_where_weights_fall(early, temperature, rejects):
    """Also in a sampler that no configuration has resolved."""
    assert make(early_reject=early, proposal_temperature=temperature).rejects_early() is rejects


@pytest.mark.parametrize(("cut", "length", "most"), [
    ("current", 3, 0.0), ("confidence", None, math.log(1.1 / 1.9 / (0.8 / 1.8)))])
def test_the_floor_by_hand(cut, length, most):
    """Places of the state have the weights 0.8, 0.8 and 0.2 with cut=confidence; a place has at most 1.1."""
    path = score(engine(), (1, 2, 0), SamplingParams(0.25), "blended")._replace(log_p=np.log([0.3, 0.3, 0.9]))
    sampler = make(cut=cut)
    floor = sampler.move().floor(path, 5, 1, -0.5)
    assert (floor.log_uniform, floor.alpha, floor.length) == (-0.5, 4.0, length)
    assert floor.reference == pytest.approx(4.0 * np.log(0.27) - path.log_q[1:].sum() - most, abs=1e-12)
    assert floor.margin == pytest.approx(ROUNDING * 4.0 * 4, abs=1e-12)


@pytest.mark.parametrize("cut", ["current", "confidence"])
def test_early_rejection_changes_no_decision(cut):
    """The matrices agree to rounding, and some proposals are abandoned."""
    options = {"cut": cut, "proposal_temperature": 1.0}
    early, full = (step_matrix(engine(), make(early_reject=early, **options), HORIZON)[0] for early in ("exact", "off"))
    assert np.abs(early - full).max() <= EXACT
    decisions = [engine().run(make(num_steps=8, num_blocks=2, **options).chain(PROMPT, HORIZON, Key(seed))).abandoned
                 for seed in range(20)]
    assert sum(decisions) > 0


def chain_law(engine, sampler) -> dict[tuple[int, ...], float]:
    return law_of(lambda key: engine.run(sampler.chain(PROMPT, HORIZON, key)).trajectory)


@pytest.mark.parametrize(("cut", "blend"), [("current", None), ("confidence", None), ("current", BLEND)])
def test_the_chain_starts_at_the_drafts_law(cut, blend):
    """Without a step the law is the draft's. With one step it is that law times the transition matrix."""
    tabular, sampler = engine(blend), make(cut=cut, start_temperature=0.7)
    start = chain_law(tabular, make(num_steps=0, start_temperature=0.7))
    assert total_variation(start, product_target(tabular, HORIZON, SamplingParams(0.7), "draft")) <= EXACT
    matrix, target = step_matrix(tabular, sampler, HORIZON)
    moved = np.array([start[state] for state in target.states]) @ matrix
    assert total_variation(chain_law(tabular, sampler), dict(zip(target.states, moved, strict=True))) <= EXACT


def test_the_law_approaches_the_target_with_the_steps():
    """The distance from p^4 after 0, 1, 4 and 16 steps in total variation, which `docs/explanation` states."""
    tabular = engine()
    law, found = product_target(tabular, HORIZON, SamplingParams(1.0), "draft"), {}
    for cut in ("current", "confidence"):
        matrix, target = step_matrix(tabular, make(cut=cut), HORIZON)
        start = np.array([law[state] for state in target.states])
        found[cut] = [0.5 * np.abs(start @ np.linalg.matrix_power(matrix, steps) - target.probability).sum()
                      for steps in (0, 1, 4, 16)]
    assert found["current"] == pytest.approx([0.476, 0.353, 0.128, 0.001], abs=1e-3)
    assert found["confidence"] == pytest.approx([0.476, 0.357, 0.119, 0.001], abs=1e-3)
