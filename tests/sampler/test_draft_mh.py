"""`sampler=draft_mh` on the tabular engine: the power target is invariant on the absolute grid."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mcmc.blend.draft import DraftBlend
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.draft_mh import DraftMH
from dflash_mcmc.sampler.power_mh import PowerMH
from dflash_mcmc.testing import (
    PROMPT,
    balance_error,
    invariance_error,
    law_of,
    power_target,
    score,
    total_variation,
    transition_matrix,
)

EXACT, WRONG = 1e-12, 1e-3
HORIZON = 4


def make(**changes) -> DraftMH:
    return DraftMH(**{"draft_temperature": 1.0, "num_blocks": 2, "num_steps": 1, "draft_weight": 0.4, "early_reject": "off",
                      **changes})


def engine(stop_ids=(0,), blend=None, num_drafted=2, seed=0, scale=0.7) -> TabularEngine:
    draft = TabularDraft(3, num_drafted, seed=seed + 7, scale=scale)
    return TabularEngine(TabularModel(3, stop_ids, seed=seed, scale=0.5), blend, None, draft)


def errors(engine, sampler, horizon=HORIZON) -> tuple[float, float]:
    target = power_target(engine, horizon, sampler.alpha, sampler.law(), sampler.source())
    matrix = transition_matrix(engine, sampler, horizon, target)
    assert np.abs(matrix.sum(axis=1) - 1.0).max() <= EXACT
    return invariance_error(matrix, target), balance_error(matrix, target)


OPTIONS = {"current": {}, "start": {"cut": "start"}, "cold": {"draft_temperature": 0.6}, "mild": {"alpha": 1.5},
           "mixture": {"proposal": "mixture"}, "mixture_start": {"proposal": "mixture", "cut": "start", "draft_weight": 0.8}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_step_leaves_the_power_target_invariant(options):
    assert max(errors(engine(), make(**options))) <= EXACT


def test_step_leaves_the_power_target_without_stop_ids_invariant():
    assert max(errors(engine(()), make(), horizon=3)) <= EXACT


@pytest.mark.parametrize("num_drafted", [1, 3])
def test_other_block_sizes_keep_the_target_invariant(num_drafted):
    assert max(errors(engine(num_drafted=num_drafted), make())) <= EXACT


BLEND = DraftBlend(beta=0.4, grid="absolute")


def power_mh(proposal, rescore=False) -> PowerMH:
    return PowerMH(num_blocks=2, num_steps=1, proposal=proposal, early_reject="off", rescore=rescore)


@pytest.mark.parametrize("proposal", ["base", "matched"])
def test_power_mh_on_the_draft_blended_target(proposal):
    assert max(errors(engine(blend=BLEND), power_mh(proposal))) <= EXACT


def test_draft_mh_on_the_draft_blended_target():
    assert max(errors(engine(blend=BLEND), make())) <= EXACT


def test_blocks_that_start_at_the_cut_leave_no_target_invariant():
    """On the published grid a state is scored with the blocks of the proposal, so p^alpha is not invariant."""
    published = DraftBlend(beta=0.4, grid="cut")
    sampler = power_mh("matched", rescore=True)
    tabular, absolute = (engine(blend=blend, seed=1, scale=2.0) for blend in (published, BLEND))
    target = power_target(absolute, HORIZON, 4.0, sampler.law(), sampler.source())
    assert invariance_error(transition_matrix(tabular, sampler, HORIZON, target), target) > WRONG
    assert invariance_error(transition_matrix(absolute, sampler, HORIZON, target), target) <= EXACT


def test_rescoring_changes_nothing_on_an_absolute_grid():
    tabular = engine(blend=BLEND)
    target = power_target(tabular, HORIZON, 4.0, power_mh("base").law(), "base")
    matrices = [transition_matrix(tabular, power_mh("base", rescore=rescore), HORIZON, target) for rescore in (False, True)]
    assert np.abs(matrices[0] - matrices[1]).max() <= EXACT


def test_eps_errs_by_at_most_epsilon():
    """Early rejection changes each row of the transition matrix by at most epsilon in total variation."""
    epsilon, tabular = 0.3, engine()
    target = power_target(tabular, HORIZON, 4.0, make().law(), "draft")
    full = transition_matrix(tabular, make(), HORIZON, target)
    early = transition_matrix(tabular, make(early_reject="eps", epsilon=epsilon), HORIZON, target)
    moved = 0.5 * np.abs(full - early).sum(axis=1)
    assert 0.0 < moved.max() <= epsilon


@pytest.mark.parametrize(("epsilon", "early", "bound"), [(1e-3, "eps", 6e-3), (0.3, "eps", 1.0), (1e-3, "off", 0.0)])
def test_a_chain_states_the_bound_of_all_its_steps(epsilon, early, bound):
    sampler = make(early_reject=early, epsilon=epsilon, num_steps=3)
    assert engine().run(sampler.chain(PROMPT, HORIZON, Key(0))).law_error == pytest.approx(bound)


MIXTURES = {"mixture": {"proposal": "mixture"}, "mixture_start": {"proposal": "mixture", "cut": "start"}}


@pytest.mark.parametrize("options", MIXTURES.values(), ids=MIXTURES)
def test_the_mixture_leaves_a_draft_blended_target_invariant(options):
    """Its other part is the target without the blend, so that its density differs from the blended target's."""
    assert max(errors(engine(blend=BLEND, num_drafted=1), make(proposal_temperature=0.6, **options), horizon=3)) <= EXACT


@pytest.mark.parametrize("options", MIXTURES.values(), ids=MIXTURES)
def test_a_chain_of_mixtures_is_extension_and_steps_in_turn(options):
    """The chain keeps the log-probabilities of its state under the other part. A step alone computes them again."""
    sampler = make(proposal_temperature=0.6, draft_temperature=0.7, alpha=2.0, **options)
    tabular = engine(blend=BLEND, num_drafted=1)
    law = law_of(lambda key: tabular.run(sampler.chain(PROMPT, 2, key)).trajectory)
    expected = {(): 1.0}
    for horizon in (1, 2):
        target = power_target(tabular, horizon, sampler.alpha, sampler.law(), sampler.source())
        extended = np.array([sum(
            share * extension(tabular, sampler, before, tokens) for before, share in expected.items())
            for tokens in target.states])
        matrix = transition_matrix(tabular, sampler, horizon, target)
        expected = dict(zip(target.states, extended @ matrix, strict=True))
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert total_variation(law, expected) <= EXACT


def test_the_other_part_of_a_new_state_is_that_of_all_its_tokens():
    """Tokens before the cut keep their log q: a later step may cut before them. Compared with a score of the whole state."""
    tabular, sampler, moved = engine(()), make(proposal="mixture", cut="current", alpha=1.0), 0
    path = tabular.run(sampler.chain(PROMPT, HORIZON, Key(0))).trajectory
    other = tabular.run(sampler._other(path, 0))
    for number in range(60):
        step, other = tabular.run(sampler.transition(path, other, HORIZON, Key(number)))
        path, moved = step.trajectory, moved + (step.accepted and step.cut > 0)
        assert other == pytest.approx(tabular.run(sampler._other(path, 0)), abs=1e-12)
    assert moved > 5


def extension(tabular: TabularEngine, sampler: DraftMH, before: tuple, tokens: tuple) -> float:
    """The probability that a stage extends `before` to `tokens`."""
    if tokens[: len(before)] != before or (before[-1:] == (0,) and tokens != before):
        return 0.0
    return float(np.exp(score(tabular, tokens, sampler.law(), sampler.source()).log_q[len(before):].sum()))


def test_the_floor_has_the_length_only_where_cuts_are_places_of_the_state():
    tabular = engine()
    for cut, length in (("current", 3), ("start", None)):
        sampler = make(cut=cut, early_reject="eps", epsilon=1e-3)
        path = score(tabular, (1, 2, 0), sampler.law(), sampler.source())
        floor = sampler._floor(path, 0, -0.5)
        assert floor.length == length
        assert floor.margin == pytest.approx(6.907755278982137, abs=1e-12)
        assert floor.reference == pytest.approx(4.0 * path.log_p.sum() - path.log_q.sum(), abs=1e-12)
