"""The exact law of `sampler=power_mh` on the tabular engine: every option is invariant, every mutant is not."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.engine.tabular import TabularEngine, TabularModel
from dflash_mcmc.ops import Draw
from dflash_mcmc.sampler.power_mh import PowerMH
from dflash_mcmc.testing import (
    PROMPT,
    balance_error,
    invariance_error,
    law_of,
    power_target,
    product_target,
    total_variation,
    transition_matrix,
)

EXACT = 1e-12
WRONG = 1e-3
"""A mutant must miss by far more than rounding."""


def make(cls=PowerMH, **changes) -> PowerMH:
    values = dict(alpha=4.0, proposal_temperature=None, num_blocks=2, num_steps=1, cut="current", proposal="base",
                  rule="exact", after_eos="continue", top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    return cls(**{**values, **changes})


def engine_of(stop_ids=(0,), blend=None, vocab_size=3, seed=0) -> TabularEngine:
    return TabularEngine(TabularModel(vocab_size, stop_ids, seed=seed, scale=0.5), blend)


OPTIONS = {
    "cut_current": {},
    "cut_horizon": {"cut": "horizon"},
    "hot_proposal": {"proposal_temperature": 1.0},
    "cold_proposal": {"proposal_temperature": 0.15},
    "alpha_below_one": {"alpha": 0.5},
    "top_k": {"top_k": 2},
    "top_k_hot": {"top_k": 2, "proposal_temperature": 0.7, "cut": "horizon"},
    "top_p": {"top_p": 0.8, "proposal_temperature": 0.9},
    "min_p": {"min_p": 0.2, "proposal_temperature": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.4, "proposal_temperature": 0.8},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("stop_ids", [(0,), (0, 2), ()], ids=["one_stop", "two_stops", "no_stop"])
def test_step_leaves_the_power_target_invariant(options, stop_ids):
    engine, sampler, horizon = engine_of(stop_ids), make(**options), 4
    target = power_target(engine, horizon, sampler.alpha, sampler.law(), sampler.source())
    matrix = transition_matrix(engine, sampler, horizon, target)
    assert np.abs(matrix.sum(axis=1) - 1.0).max() <= EXACT
    assert invariance_error(matrix, target) <= EXACT
    assert balance_error(matrix, target) <= EXACT


@pytest.mark.parametrize("cut", ["current", "horizon"])
@pytest.mark.parametrize("proposal", ["base", "matched"])
@pytest.mark.parametrize("norm", ["none", "final"])
def test_step_leaves_the_blended_power_target_invariant(cut, proposal, norm):
    engine = engine_of(blend=LayerBlend(beta=0.3, layer=0, norm=norm))
    sampler = make(cut=cut, proposal=proposal)
    target = power_target(engine, 4, sampler.alpha, sampler.law(), sampler.source())
    matrix = transition_matrix(engine, sampler, 4, target)
    assert invariance_error(matrix, target) <= EXACT
    assert balance_error(matrix, target) <= EXACT


def test_blend_changes_the_target():
    plain, blended = engine_of(seed=1), engine_of(seed=1, blend=LayerBlend(beta=0.5, layer=0, norm="none"))
    sampler = make()
    laws = [power_target(e, 4, 4.0, sampler.law(), "base").probability for e in (plain, blended)]
    assert 0.5 * np.abs(laws[0] - laws[1]).sum() > WRONG


@pytest.mark.parametrize("seed", range(3))
def test_repeated_steps_converge_to_the_target(seed):
    engine, sampler = engine_of((0, 2), seed=seed), make(proposal_temperature=0.5)
    target = power_target(engine, 4, sampler.alpha, sampler.law(), sampler.source())
    matrix = transition_matrix(engine, sampler, 4, target)
    for _ in range(40):
        matrix = matrix @ matrix
        matrix /= matrix.sum(axis=1, keepdims=True)
    assert 0.5 * np.abs(matrix - target.probability).sum(axis=1).max() <= 1e-9


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("cut", ["current", "horizon"])
def test_whole_chain_is_extension_and_steps_in_turn(num_steps, cut):
    """Law of a two-block chain, enumerated at once, against the product of its stages' exact matrices."""
    engine, sampler = engine_of((0, 2)), make(num_steps=num_steps, cut=cut)
    law = law_of(lambda key: engine.run(sampler.chain(PROMPT, 4, key)).path)
    expected = _compose(engine, sampler, blocks=(2, 4))
    assert abs(sum(law.values()) - 1.0) <= EXACT
    assert total_variation(law, expected) <= EXACT


def test_returning_at_a_stop_id_skips_the_later_stages_of_finished_chains_only():
    engine, sampler = engine_of((0,)), make(after_eos="return", num_steps=1)
    law = law_of(lambda key: engine.run(sampler.chain(PROMPT, 4, key)).path)
    first = _compose(engine, sampler, blocks=(2,))
    finished = {tokens: p for tokens, p in first.items() if tokens[-1] == 0}
    unfinished = {tokens: p for tokens, p in first.items() if tokens[-1] != 0}
    expected = _compose(engine, sampler, blocks=(4,), start=unfinished)
    for tokens, probability in finished.items():
        expected[tokens] = expected.get(tokens, 0.0) + probability
    assert total_variation(law, expected) <= EXACT


def _compose(engine, sampler, blocks, start=None):
    law = start or {(): 1.0}
    for horizon in blocks:
        extended = {}
        whole = product_target(engine, horizon, sampler.law(), sampler.source())
        for tokens, probability in law.items():
            if tokens and tokens[-1] in engine.model.stop_ids:
                extended[tokens] = extended.get(tokens, 0.0) + probability
                continue
            continuations = {t: q for t, q in whole.items() if t[: len(tokens)] == tokens}
            total = sum(continuations.values())
            for longer, q in continuations.items():
                extended[longer] = extended.get(longer, 0.0) + probability * q / total
        law = extended
        target = power_target(engine, horizon, sampler.alpha, sampler.law(), sampler.source())
        matrix = transition_matrix(engine, sampler, horizon, target)
        vector = np.array([law.get(state, 0.0) for state in target.states])
        for _ in range(sampler.num_steps):
            vector = vector @ matrix
        law = dict(zip(target.states, vector.tolist(), strict=True))
    return law


@dataclass(slots=True, kw_only=True)
class NoLengthTerm(PowerMH):
    def log_ratio(self, path, proposal, cut):
        return self.log_weight(proposal, cut, None) - self.log_weight(path, cut, None)


@dataclass(slots=True, kw_only=True)
class WrongHastingsSign(PowerMH):
    def log_weight(self, path, start, stop):
        return float(np.sum(self.alpha * path.log_p[start:stop] + path.log_q[start:stop]))


@dataclass(slots=True, kw_only=True)
class OverlapSlice(PowerMH):
    def log_ratio(self, path, proposal, cut):
        overlap = min(path.length, proposal.length)
        return (self.log_weight(proposal, cut, overlap) - self.log_weight(path, cut, overlap)
                + np.log(path.length / proposal.length))


@dataclass(slots=True, kw_only=True)
class ArgmaxFirstToken(PowerMH):
    """Takes the most likely token at the cut, as implementations do that reuse the greedy token of a prefill."""

    def step(self, path, horizon, key):
        chain = PowerMH.step(self, path, horizon, key)
        operation = next(chain)
        while True:
            greedy = yield Draw(operation.path, operation.path.length + 1, operation.law._replace(temperature=0.0),
                                key.fold_in("greedy"), operation.source)
            try:
                operation = chain.send((yield operation._replace(path=greedy)))
            except StopIteration as stop:
                return stop.value


MUTANTS = (NoLengthTerm, WrongHastingsSign, OverlapSlice, ArgmaxFirstToken)


@pytest.mark.parametrize(("mutant", "seed"), list(itertools.product(MUTANTS, range(3))))
def test_mutants_fail(mutant, seed):
    engine, sampler = engine_of((0,), seed=seed), make(mutant, proposal_temperature=0.5)
    target = power_target(engine, 4, sampler.alpha, sampler.law(), sampler.source())
    assert invariance_error(transition_matrix(engine, sampler, 4, target), target) > WRONG


def test_published_rule_misses_the_target_by_more_the_longer_it_runs():
    """Its proposals can only shorten a sequence: a stump without a stop id is where its mass ends up."""
    engine, laws = engine_of((0,), seed=1), []
    for num_steps in (1, 3):
        sampler = make(rule="published", num_blocks=1, num_steps=num_steps, proposal_temperature=0.5)
        laws.append(law_of(lambda key, s=sampler: engine.run(s.chain(PROMPT, 3, key)).path))
    sampler = make(num_blocks=1, proposal_temperature=0.5)
    target = power_target(engine, 3, sampler.alpha, sampler.law(), sampler.source())
    exact = dict(zip(target.states, target.probability.tolist(), strict=True))
    lengths = [sum(p * len(t) for t, p in law.items()) for law in (*laws, exact)]
    assert lengths[1] < lengths[0]
    assert all(abs(sum(law.values()) - 1.0) <= EXACT for law in laws)
    assert all(total_variation(law, exact) > WRONG for law in laws)
