"""`sampler=draft_mh` on the tabular engine: the power target is invariant on the absolute grid."""

import pytest

from dflash_mcmc.blend.draft import DraftBlend
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.draft_mh import DraftMH
from dflash_mcmc.sampler.power_mh import PowerMH
from dflash_mcmc.testing import PROMPT, law_of, total_variation
from tests.cases import quick
from tests.sampler.stages import extended, step_error, stepped

EXACT = 1e-12
HORIZON = 4


def make(**changes) -> DraftMH:
    return DraftMH(**{"draft_temperature": 1.0, "num_blocks": 2, "num_steps": 1, "draft_weight": 0.4, **changes})


def engine(stop_ids=(0,), blend=None, num_drafted=2, seed=0, scale=0.7) -> TabularEngine:
    draft = TabularDraft(3, num_drafted, seed=seed + 7, scale=scale)
    return TabularEngine(TabularModel(3, stop_ids, seed=seed, scale=0.5), blend, None, draft)


OPTIONS = {"default": {}, "cold": {"draft_temperature": 0.6}, "mild": {"alpha": 1.5},
           "mixture": {"proposal": "mixture"}, "much_draft": {"proposal": "mixture", "draft_weight": 0.8}}


@pytest.mark.parametrize("name", quick(OPTIONS, "default", "mixture"))
def test_step_leaves_the_power_target_invariant(name):
    assert step_error(engine(), make(**OPTIONS[name]), HORIZON) <= EXACT


BLEND = DraftBlend(beta=0.4)


@pytest.mark.parametrize(("sampler", "horizon", "parts"), [
    (make(), 3, {"stop_ids": ()}), (make(), HORIZON, {"num_drafted": 1}), (make(), HORIZON, {"num_drafted": 3}),
    (make(), HORIZON, {"blend": BLEND}),
    *((PowerMH(num_blocks=2, num_steps=1, proposal=proposal), HORIZON, {"blend": BLEND}) for proposal in ("base", "matched")),
], ids=["no stop ids", "blocks of one", "blocks of three", "blend", "power_mh base", "power_mh matched"])
def test_step_leaves_the_target_of_other_engines_invariant(sampler, horizon, parts):
    assert step_error(engine(**parts), sampler, horizon) <= EXACT


def test_the_mixture_leaves_a_draft_blended_target_invariant():
    """Its other part is the target without the blend, so that its density differs from the blended target's."""
    sampler = make(proposal="mixture", proposal_temperature=0.6)
    assert step_error(engine(blend=BLEND, num_drafted=1), sampler, 3) <= EXACT


@pytest.mark.slow
def test_a_chain_of_mixtures_is_extension_and_steps_in_turn():
    """The chain keeps the log-probabilities of its state under the other part. A step alone computes them again."""
    sampler = make(proposal="mixture", proposal_temperature=0.6, draft_temperature=0.7, alpha=2.0)
    tabular = engine(blend=BLEND, num_drafted=1)
    law = law_of(lambda key: tabular.run(sampler.chain(PROMPT, 2, key)).trajectory)
    expected = {(): 1.0}
    for horizon in (1, 2):
        expected = stepped(tabular, sampler, extended(tabular, sampler, expected, horizon), horizon)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert total_variation(law, expected) <= EXACT


def test_the_other_part_of_a_new_state_is_that_of_all_its_tokens():
    """Tokens before the cut keep their log q: a later step may cut before them. Compared with a score of the whole state."""
    tabular, sampler, moved = engine(()), make(proposal="mixture", alpha=1.0), 0
    path = tabular.run(sampler.chain(PROMPT, HORIZON, Key(0))).trajectory
    other = tabular.run(sampler._other(path, 0))
    for number in range(60):
        step, other = tabular.run(sampler.transition(path, other, HORIZON, Key(number)))
        path, moved = step.trajectory, moved + (step.accepted and step.cut > 0)
        assert other == pytest.approx(tabular.run(sampler._other(path, 0)), abs=1e-12)
    assert moved > 5
