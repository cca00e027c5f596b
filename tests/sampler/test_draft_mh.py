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

EXACT = 1e-12
HORIZON = 4


def make(**changes) -> DraftMH:
    return DraftMH(**{"draft_temperature": 1.0, "num_blocks": 2, "num_steps": 1, "draft_weight": 0.4, **changes})


def engine(stop_ids=(0,), blend=None, num_drafted=2, seed=0, scale=0.7) -> TabularEngine:
    draft = TabularDraft(3, num_drafted, seed=seed + 7, scale=scale)
    return TabularEngine(TabularModel(3, stop_ids, seed=seed, scale=0.5), blend, None, draft)


def errors(engine, sampler, horizon=HORIZON) -> tuple[float, float]:
    target = power_target(engine, horizon, sampler.alpha, sampler.law(), sampler.source())
    matrix = transition_matrix(engine, sampler, horizon, target)
    assert np.abs(matrix.sum(axis=1) - 1.0).max() <= EXACT
    return invariance_error(matrix, target), balance_error(matrix, target)


OPTIONS = {"default": {}, "cold": {"draft_temperature": 0.6}, "mild": {"alpha": 1.5},
           "mixture": {"proposal": "mixture"}, "much_draft": {"proposal": "mixture", "draft_weight": 0.8}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_step_leaves_the_power_target_invariant(options):
    assert max(errors(engine(), make(**options))) <= EXACT


def test_step_leaves_the_power_target_without_stop_ids_invariant():
    assert max(errors(engine(()), make(), horizon=3)) <= EXACT


@pytest.mark.parametrize("num_drafted", [1, 3])
def test_other_block_sizes_keep_the_target_invariant(num_drafted):
    assert max(errors(engine(num_drafted=num_drafted), make())) <= EXACT


BLEND = DraftBlend(beta=0.4)


@pytest.mark.parametrize("proposal", ["base", "matched"])
def test_power_mh_on_the_draft_blended_target(proposal):
    assert max(errors(engine(blend=BLEND), PowerMH(num_blocks=2, num_steps=1, proposal=proposal))) <= EXACT


def test_draft_mh_on_the_draft_blended_target():
    assert max(errors(engine(blend=BLEND), make())) <= EXACT


def test_the_mixture_leaves_a_draft_blended_target_invariant():
    """Its other part is the target without the blend, so that its density differs from the blended target's."""
    sampler = make(proposal="mixture", proposal_temperature=0.6)
    assert max(errors(engine(blend=BLEND, num_drafted=1), sampler, horizon=3)) <= EXACT


def test_a_chain_of_mixtures_is_extension_and_steps_in_turn():
    """The chain keeps the log-probabilities of its state under the other part. A step alone computes them again."""
    sampler = make(proposal="mixture", proposal_temperature=0.6, draft_temperature=0.7, alpha=2.0)
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
    tabular, sampler, moved = engine(()), make(proposal="mixture", alpha=1.0), 0
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
