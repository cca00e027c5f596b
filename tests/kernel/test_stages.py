"""Stages whose number does not divide the length: their horizons, and the law of a whole chain."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.kernel.metropolis import stage_horizon
from dflash_mcmc.registry import components
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import power_mh
from dflash_mcmc.testing import PROMPT, law_of, power_target, product_target, total_variation, transition_matrix

EXACT, WRONG = 1e-12, 1e-3
STAGED = ["power_mh", "multiple_try", "replica_exchange", "draft_mh", "draft_refine"]


def wrong_horizon(block: int, num_blocks: int, horizon: int) -> int:
    """The mutant: stages of equal length, which leave out the rest."""
    return block * (horizon // num_blocks)


@pytest.mark.parametrize("horizon", [1, 3, 7, 64, 100])
def test_horizons_rise_to_the_full_one(horizon):
    for num_blocks in range(1, horizon + 1):
        found = [stage_horizon(block, num_blocks, horizon) for block in range(num_blocks + 1)]
        assert (found[0], found[-1]) == (0, horizon)
        steps = np.diff(found)
        assert steps.min() >= 1
        assert steps.max() - steps.min() <= 1
        if horizon % num_blocks == 0:
            assert found == [wrong_horizon(block, num_blocks, horizon) for block in range(num_blocks + 1)]


@pytest.mark.parametrize("name", STAGED)
def test_a_chain_has_the_full_length(name, monkeypatch):
    sampler = components("sampler")[name].cls(num_blocks=3, num_steps=1)
    engine = TabularEngine(TabularModel(3, (), seed=0), None, None, TabularDraft(3, 2, seed=7))
    assert engine.run(sampler.chain(PROMPT, 5, Key(0))).trajectory.length == 5
    monkeypatch.setattr(f"dflash_mcmc.sampler.{name}.stage_horizon", wrong_horizon)
    assert engine.run(sampler.chain(PROMPT, 5, Key(0))).trajectory.length == 3


def law_by_hand(engine: TabularEngine, sampler: power_mh.PowerMH) -> dict:
    """Two stages with the horizons 1 and 3: a draw and a step, the rest of a draw and a step."""
    draws = {horizon: product_target(engine, horizon, sampler.law()) for horizon in (1, 3)}

    def after_a_step(law: dict, horizon: int) -> dict:
        target = power_target(engine, horizon, sampler.alpha, sampler.law(), sampler.source())
        start = np.array([law.get(tokens, 0.0) for tokens in target.states])
        return dict(zip(target.states, start @ transition_matrix(engine, sampler, horizon, target), strict=True))

    first = after_a_step(draws[1], 1)
    extended = {tokens: first[tokens[:1]] * probability / draws[1][tokens[:1]] for tokens, probability in draws[3].items()}
    return after_a_step(extended, 3)


def test_the_law_of_two_stages_of_three_tokens(monkeypatch):
    engine = TabularEngine(TabularModel(3, (0,), seed=0, scale=0.5), None)
    sampler = power_mh.PowerMH(alpha=2, num_blocks=2, num_steps=1)

    def error() -> float:
        drawn = law_of(lambda key: engine.run(sampler.chain(PROMPT, 3, key)).trajectory)
        return total_variation(drawn, law_by_hand(engine, sampler))

    assert error() <= EXACT
    monkeypatch.setattr(power_mh, "stage_horizon", wrong_horizon)
    assert error() >= WRONG
