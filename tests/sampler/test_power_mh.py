"""`sampler=power_mh` on the tabular engine: every option keeps the power target invariant."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.kernel import ROUNDING
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.power_mh import PowerMH
from dflash_mcmc.testing import (
    PROMPT,
    Target,
    balance_error,
    invariance_error,
    law_of,
    power_target,
    product_target,
    score,
    total_variation,
    transition_matrix,
)
from tests.laws import power_law, product_law, published_law

EXACT = 1e-12
WRONG = 1e-3
"""A difference far above rounding."""


def make(**changes) -> PowerMH:
    return PowerMH(**{"num_blocks": 2, "num_steps": 1, "early_reject": "off", **changes})


def engine_of(stop_ids=(0,), blend=None, vocab_size=3, seed=0, scale=0.5) -> TabularEngine:
    return TabularEngine(TabularModel(vocab_size, stop_ids, seed=seed, scale=scale), blend)


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
    "count_penalties": {"frequency_penalty": 0.5, "presence_penalty": -0.4, "proposal_temperature": 0.8},
}
BLENDED = {"plain": {}, "hot_top_k": {"top_k": 2, "proposal_temperature": 0.7}, "horizon": {"cut": "horizon"}}
_OF_Q = ("top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


def q_by_hand(engine: TabularEngine, horizon: int, options: dict, blend=None) -> dict:
    """The proposal law of the options, computed from its definition without the sampler."""
    temperature = options.get("proposal_temperature") or 1.0 / options.get("alpha", 4.0)
    return product_law(engine.model, horizon, blend, temperature=temperature,
                       **{name: options[name] for name in _OF_Q if name in options})


def target_by_hand(engine: TabularEngine, horizon: int, options: dict, blend=None, proposal_blend=None) -> Target:
    """p^alpha on the support of q, computed from the definition."""
    support = q_by_hand(engine, horizon, options, proposal_blend)
    law = power_law(engine.model, horizon, options.get("alpha", 4.0), support, blend)
    return Target(list(law), np.array(list(law.values())))


def check_step(engine, sampler, target, horizon=4):
    matrix = transition_matrix(engine, sampler, horizon, target)
    assert np.abs(matrix.sum(axis=1) - 1.0).max() <= EXACT
    assert invariance_error(matrix, target) <= EXACT
    assert balance_error(matrix, target) <= EXACT
    return matrix


STOPS = {"one_stop": (0,), "two_stops": (0, 2), "no_stop": ()}


@pytest.mark.parametrize(("options", "stop_ids"), [
    pytest.param(OPTIONS[name], ids, id=f"{stops}-{name}")
    for name in OPTIONS for stops, ids in STOPS.items() if ids or name == "top_k"])  # without a stop id each takes seconds
def test_step_leaves_the_power_target_invariant(options, stop_ids):
    engine = engine_of(stop_ids)
    check_step(engine, make(**options), target_by_hand(engine, 4, options))


@pytest.mark.parametrize("options", BLENDED.values(), ids=BLENDED.keys())
@pytest.mark.parametrize("proposal", ["base", "matched"])
@pytest.mark.parametrize("norm", ["none", "final"])
@pytest.mark.parametrize("stop_ids", [(0,), (0, 2)], ids=["one_stop", "two_stops"])
def test_step_leaves_the_blended_power_target_invariant(options, proposal, norm, stop_ids):
    engine, blend = engine_of(stop_ids, LayerBlend(beta=0.3, layer=0, layers=None, norm=norm)), (0.3, norm)
    target = target_by_hand(engine, 4, options, blend, blend if proposal == "matched" else None)
    check_step(engine, make(proposal=proposal, **options), target)


TURNED = [(1, -1.0), (2, -1.0), (0, 1.0)]
"""The fixed rotation of three dimensions, written down: a changed one gives other laws to the runs of blend=noise."""


@pytest.mark.parametrize("proposal", ["base", "matched"])
def test_step_leaves_the_power_target_with_a_random_direction_invariant(proposal):
    engine = engine_of((0, 2), LayerBlend(beta=-0.3, layer=0, norm="final", direction="random"))
    blend = (-0.3, "final", ("tapped",), TURNED)
    target = target_by_hand(engine, 4, {}, blend, blend if proposal == "matched" else None)
    check_step(engine, make(proposal=proposal), target)
    layer = target_by_hand(engine, 4, {}, blend[:2])
    assert 0.5 * np.abs(target.probability - layer.probability).sum() > WRONG


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_proposal_law_follows_the_options(options):
    engine = engine_of((0, 2))
    assert total_variation(drawn(engine, make(**options)), q_by_hand(engine, 3, options)) <= EXACT


@pytest.mark.parametrize("norm", ["none", "final"])
def test_proposals_use_the_logits_of_the_proposal_option(norm):
    engine, blend = engine_of((0,), LayerBlend(beta=0.5, layer=0, layers=None, norm=norm), seed=1), (0.5, norm)
    laws = {"base": q_by_hand(engine, 3, {}), "matched": q_by_hand(engine, 3, {}, blend)}
    for proposal, law in laws.items():
        assert total_variation(drawn(engine, make(proposal=proposal)), law) <= EXACT
    assert total_variation(laws["base"], laws["matched"]) > WRONG


def drawn(engine, sampler) -> dict:
    """Exact law of the first block's extension, which is the proposal law."""
    sampler = dataclasses.replace(sampler, num_blocks=1, num_steps=0)
    return law_of(lambda key: engine.run(sampler.chain(PROMPT, 3, key)).trajectory)


EARLY = {name: options for name, options in OPTIONS.items()
         if name not in ("cold_proposal", "alpha_below_one", "repetition_penalty", "count_penalties")}


@pytest.mark.parametrize("options", EARLY.values(), ids=EARLY)
def test_early_rejection_leaves_the_power_target_invariant(options):
    """The transition matrix equals that without early rejection."""
    engine, target = engine_of(), target_by_hand(engine_of(), 4, options)
    early = make(early_reject="exact", **options)
    matrix = check_step(engine, early, target)
    assert np.abs(matrix - transition_matrix(engine, make(**options), 4, target)).max() <= EXACT
    if options in ({}, {"cut": "horizon"}, {"proposal_temperature": 1.0}):
        assert abandons(engine, early, target)


def abandons(engine, sampler, target) -> bool:
    """Whether some step rejects a proposal before it is complete."""
    decisions = set()

    def program(key):
        step = engine.run(sampler.step(path, 4, key))
        decisions.add(step.decision)
        return step.trajectory

    for tokens in target.states:
        path = score(engine, tokens, sampler.law(), sampler.source())
        law_of(program)
    return "abandon" in decisions


@pytest.mark.parametrize("norm", ["none", "final"])
def test_early_rejection_of_matched_blended_proposals_is_exact(norm):
    engine, blend = engine_of((0,), LayerBlend(beta=0.3, layer=0, layers=None, norm=norm)), (0.3, norm)
    check_step(engine, make(proposal="matched", early_reject="exact"), target_by_hand(engine, 4, {}, blend, blend))


NOT_EXACT = {
    "hot": ({"alpha": 1.0, "proposal_temperature": 4.0}, None),
    "cold": ({"alpha": 1.5, "proposal_temperature": 0.3}, None),
    "penalty": ({"alpha": 1.2, "repetition_penalty": 3.0, "proposal_temperature": 0.9}, None),
    "presence": ({"alpha": 1.2, "presence_penalty": 1.5, "proposal_temperature": 0.9}, None),
    "alpha_below_one": ({"alpha": 0.5, "proposal_temperature": 1.5}, None),
    "base_of_a_blend": ({"alpha": 1.5}, LayerBlend(beta=0.8, layer=0, layers=None, norm="none")),
}


@pytest.mark.parametrize(("options", "blend"), NOT_EXACT.values(), ids=NOT_EXACT.keys())
def test_early_rejection_would_be_wrong_where_it_is_refused(options, blend, make_config):
    """Each refusal is necessary. If early rejection is used nevertheless, the target is not invariant."""
    engine = engine_of((0,), blend, scale=1.0)
    target = target_by_hand(engine, 4, options, None if blend is None else (blend.beta, blend.norm))
    check_step(engine, make(**options), target)
    matrix = transition_matrix(engine, make(early_reject="exact", **options), 4, target)
    assert invariance_error(matrix, target) > 5e-5
    overrides = [f"sampler.{name}={value}" for name, value in options.items()] + (["blend=layer"] if blend else [])
    with pytest.raises(ConfigError, match=r"sampler\.early_reject: given 'exact'; allowed: auto, off"):
        make_config("sampler.early_reject=exact", *overrides)
    assert make_config(*overrides).sampler.early_reject == "off"


def test_auto_means_exact_where_exact_is_allowed(make_config):
    assert make_config("sampler=power_mh").sampler.early_reject == "exact"
    assert make_config("sampler=power_mh", "blend=layer", "sampler.proposal=matched").sampler.early_reject == "exact"
    assert make_config("sampler=power_mh", "sampler.rule=published").sampler.early_reject == "off"
    with pytest.raises(ConfigError, match="compares overlaps"):
        make_config("sampler=power_mh", "sampler.rule=published", "sampler.early_reject=eps")
    with pytest.raises(ConfigError, match="below 1"):
        make_config("sampler=power_mh", "sampler.alpha=0.5", "sampler.early_reject=eps")


def test_only_eps_is_part_of_the_identity(make_config):
    hashes = {name: identity_hash(make_config("sampler=power_mh", f"sampler.early_reject={name}"))
              for name in ("auto", "off", "exact", "eps")}
    assert hashes["auto"] == hashes["off"] == hashes["exact"] != hashes["eps"]
    assert identity_hash(make_config("sampler=power_mh", "sampler.epsilon=0.01")) == hashes["off"]


@pytest.mark.parametrize("options", [{"proposal_temperature": 2.0}, {"repetition_penalty": 2.0, "proposal_temperature": 1.5},
                                     {"proposal_temperature": 2.0, "cut": "horizon"}], ids=["hot", "penalty", "horizon"])
def test_eps_changes_each_step_by_at_most_epsilon(options):
    epsilon, engine, target = 0.03, engine_of((0,)), target_by_hand(engine_of((0,)), 4, options)
    eps, full = make(early_reject="eps", epsilon=epsilon, **options), make(**options)
    matrices = [transition_matrix(engine, sampler, 4, target) for sampler in (eps, full)]
    errors = 0.5 * np.abs(matrices[0] - matrices[1]).sum(axis=1)
    assert errors.max() <= epsilon
    assert abandons(engine, eps, target)


def test_eps_without_its_margin_errs_by_more():
    """The margin is necessary: rejecting as `exact` does, when the ratio so far is below u, exceeds the bound."""
    options = {"alpha": 1.0, "proposal_temperature": 4.0}
    engine = engine_of((0,), scale=1.0)
    target = target_by_hand(engine, 4, options)
    exact, eps, full = (transition_matrix(engine, make(early_reject=name, epsilon=0.01, **options), 4, target)
                        for name in ("exact", "eps", "off"))
    errors = [0.5 * np.abs(matrix - full).sum(axis=1).max() for matrix in (exact, eps)]
    assert errors[0] > 0.01 >= errors[1]


def test_eps_reports_its_bound():
    result = engine_of((0,)).run(make(early_reject="eps", epsilon=1e-3, num_steps=3).chain(PROMPT, 4, Key(0)))
    assert result.law_error == pytest.approx(6e-3)
    assert engine_of((0,)).run(make(early_reject="eps", epsilon=0.6, num_steps=3).chain(PROMPT, 4, Key(0))).law_error == 1.0
    assert engine_of((0,)).run(make(early_reject="exact").chain(PROMPT, 4, Key(0))).law_error == 0.0


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("cut", ["current", "horizon"])
def test_whole_chain_is_extension_and_steps_in_turn(num_steps, cut):
    """Compares the enumerated law of a two-block chain with the product of the matrices of its stages."""
    engine, sampler = engine_of((0, 2)), make(num_steps=num_steps, cut=cut)
    law = law_of(lambda key: engine.run(sampler.chain(PROMPT, 4, key)).trajectory)
    expected = _compose(engine, sampler, blocks=(2, 4))
    assert abs(sum(law.values()) - 1.0) <= EXACT
    assert total_variation(law, expected) <= EXACT


@pytest.mark.slow
def test_after_eos_return_skips_later_stages_of_finished_chains_only():
    engine, sampler = engine_of((0,)), make(after_eos="return", num_steps=1)
    law = law_of(lambda key: engine.run(sampler.chain(PROMPT, 4, key)).trajectory)
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


@pytest.mark.parametrize("seed", range(3))
def test_published_rule_equals_the_published_kernel(seed):
    """Compares the law with that of the published code, computed by `tests/laws.py`."""
    engine = engine_of((0,), seed=seed, vocab_size=2)
    sampler = make(rule="published", num_blocks=2, num_steps=1, proposal_temperature=0.5)
    law = law_of(lambda key: engine.run(sampler.chain(PROMPT, 4, key)).trajectory)
    assert total_variation(law, published_law(engine.model, 4.0, 0.5, blocks=2, block_length=2, steps=1)) <= EXACT


def test_the_public_helpers_work_as_documented():
    engine, sampler = engine_of((0,)), make()
    target = power_target(engine, 3, sampler.alpha, sampler.law(), sampler.source())
    assert invariance_error(transition_matrix(engine, sampler, 3, target), target) <= EXACT
    assert total_variation(product_target(engine, 3, sampler.law()), product_law(engine.model, 3, temperature=0.25)) <= EXACT
    with pytest.raises(TypeError, match="no finite set of outcomes"):
        law_of(lambda key: key.uniform())
    with pytest.raises(AssertionError, match="is used twice"):
        law_of(lambda key: (key.integer(2), key.integer(2)))


# The floor of `sampler=power_mh`: its margin, its length term, and where `auto` has none.

def floor_of(place: int = 1, log_uniform: float = -0.5, **options):
    sampler, engine = make(**options), engine_of(())
    path = score(engine, (1, 2, 0, 2), sampler.law(), sampler.source())
    return sampler.threshold(path, 6, place, log_uniform), path


def test_the_margin_of_eps_is_the_logarithm_of_one_over_epsilon():
    """Ville's inequality: a supermartingale that has fallen below u * epsilon rises above u with probability <= epsilon."""
    for epsilon, margin in ((1e-3, 6.907755278982137), (0.5, 0.6931471805599453)):
        assert floor_of(early_reject="eps", epsilon=epsilon)[0].margin == pytest.approx(margin, abs=1e-12)


def test_the_margin_of_exact_is_the_rounding_of_the_tokens_that_may_come():
    assert floor_of(early_reject="exact")[0].margin == pytest.approx(ROUNDING * 4.0 * 5, abs=1e-15)


def test_the_floor_compares_with_the_weight_of_the_current_suffix():
    floor, path = floor_of(place=2, early_reject="exact")
    assert len(PROMPT) + path.length == 5
    assert floor.log_uniform == -0.5
    assert floor.reference == pytest.approx(4.0 * path.log_p[2:].sum() - path.log_q[2:].sum(), abs=1e-12)
    assert floor.crossed(floor.reference - 0.5 - floor.margin - math.log(4 / 3) - 1e-9, 3)
    assert not floor.crossed(floor.reference - 0.5 - floor.margin - math.log(4 / 3) + 1e-9, 3)


def test_the_length_counts_only_where_cuts_are_places_of_the_state():
    assert floor_of(early_reject="exact")[0].length == 4
    assert floor_of(early_reject="exact", cut="horizon")[0].length is None


@pytest.mark.parametrize(("options", "blend"), NOT_EXACT.values(), ids=NOT_EXACT.keys())
def test_auto_from_python_is_off_where_exact_would_be_wrong(options, blend):
    """A sampler made in Python is not resolved by a configuration, and its engine may have a blend."""
    engine = engine_of((0,), blend, scale=1.0)
    target = target_by_hand(engine, 4, options, None if blend is None else (blend.beta, blend.norm))
    check_step(engine, make(early_reject="auto", **options), target)


def test_auto_from_python_rejects_early_where_no_blend_matters():
    assert floor_of(early_reject="auto", proposal="matched")[0] is not None
    assert floor_of(early_reject="auto", proposal="base")[0] is None
    assert floor_of(early_reject="off", proposal="matched")[0] is None
