"""`sampler=power_mh` on the tabular engine: every option keeps the power target invariant."""

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
from dflash_mcmc.testing import PROMPT, Target, invariance_error, law_of, score, total_variation, transition_matrix
from tests.laws import power_law, product_law, published_law
from tests.sampler.stages import extended, matrix_error, stepped

EXACT = 1e-12
WRONG = 1e-3
"""A difference far above rounding."""


def make(**changes) -> PowerMH:
    return PowerMH(**{"num_blocks": 2, "num_steps": 1, "early_reject": "off", **changes})


def engine_of(stop_ids=(0,), blend=None, vocab_size=3, seed=0, scale=0.5) -> TabularEngine:
    return TabularEngine(TabularModel(vocab_size, stop_ids, seed=seed, scale=scale), blend)


OPTIONS = {
    "default": {},
    "hot_proposal": {"proposal_temperature": 1.0},
    "cold_proposal": {"proposal_temperature": 0.15},
    "alpha_below_one": {"alpha": 0.5},
    "top_k": {"top_k": 2},
    "top_k_hot": {"top_k": 2, "proposal_temperature": 0.7},
    "top_p": {"top_p": 0.8, "proposal_temperature": 0.9},
}
BLENDED = {"plain": {}, "hot_top_k": {"top_k": 2, "proposal_temperature": 0.7}}
_OF_Q = ("top_k", "top_p")


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
    assert matrix_error(matrix, target) <= EXACT
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
    engine, blend = engine_of(stop_ids, LayerBlend(beta=0.3, layer=0, norm=norm)), (0.3, norm)
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
    engine, blend = engine_of((0,), LayerBlend(beta=0.5, layer=0, norm=norm), seed=1), (0.5, norm)
    laws = {"base": q_by_hand(engine, 3, {}), "matched": q_by_hand(engine, 3, {}, blend)}
    for proposal, law in laws.items():
        assert total_variation(drawn(engine, make(proposal=proposal)), law) <= EXACT
    assert total_variation(laws["base"], laws["matched"]) > WRONG


def drawn(engine, sampler) -> dict:
    """Exact law of the first block's extension, which is the proposal law."""
    sampler = dataclasses.replace(sampler, num_blocks=1, num_steps=0)
    return law_of(lambda key: engine.run(sampler.chain(PROMPT, 3, key)).trajectory)


EARLY = {name: options for name, options in OPTIONS.items()
         if name not in ("cold_proposal", "alpha_below_one")}


@pytest.mark.parametrize("options", EARLY.values(), ids=EARLY)
def test_early_rejection_leaves_the_power_target_invariant(options):
    """The transition matrix equals that without early rejection."""
    engine, target = engine_of(), target_by_hand(engine_of(), 4, options)
    early = make(early_reject="exact", **options)
    matrix = check_step(engine, early, target)
    assert np.abs(matrix - transition_matrix(engine, make(**options), 4, target)).max() <= EXACT
    if options in ({}, {"proposal_temperature": 1.0}):
        longer = dataclasses.replace(early, num_steps=8)
        assert sum(engine.run(longer.chain(PROMPT, 4, Key(seed))).abandoned for seed in range(20)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["none", "final"])
def test_early_rejection_of_matched_blended_proposals_is_exact(norm):
    engine, blend = engine_of((0,), LayerBlend(beta=0.3, layer=0, norm=norm)), (0.3, norm)
    check_step(engine, make(proposal="matched", early_reject="exact"), target_by_hand(engine, 4, {}, blend, blend))


NOT_EXACT = {
    "hot": ({"alpha": 1.0, "proposal_temperature": 4.0}, None),
    "cold": ({"alpha": 1.5, "proposal_temperature": 0.3}, None),
    "alpha_below_one": ({"alpha": 0.5, "proposal_temperature": 1.5}, None),
    "base_of_a_blend": ({"alpha": 1.5}, LayerBlend(beta=0.8, layer=0, norm="none")),
}


@pytest.mark.parametrize(("options", "blend"), [
    pytest.param(*given, id=name, marks=[pytest.mark.slow] * (name != "hot"))
    for name, given in NOT_EXACT.items()])
def test_early_rejection_would_be_wrong_where_it_is_refused(options, blend, make_config):
    """Each refusal is necessary. If early rejection is used nevertheless, the target is not invariant."""
    class Careless(PowerMH):
        __slots__ = ()

        def why_not_early(self, unblended: bool) -> str:
            return ""

    engine = engine_of((0,), blend, scale=1.0)
    target = target_by_hand(engine, 4, options, None if blend is None else (blend.beta, blend.norm))
    for early in ("off", "auto"):  # auto of a sampler that no configuration has resolved is off
        check_step(engine, make(early_reject=early, **options), target)
    matrix = transition_matrix(engine, Careless(num_blocks=2, num_steps=1, early_reject="exact", **options), 4, target)
    assert invariance_error(matrix, target) > 5e-5
    overrides = [f"sampler.{name}={value}" for name, value in options.items()] + (["blend=layer"] if blend else [])
    with pytest.raises(ConfigError, match=r"sampler\.early_reject: given 'exact'; allowed: auto or off"):
        make_config("sampler.early_reject=exact", *overrides)
    assert make_config(*overrides).sampler.early_reject == "off"


def test_auto_means_exact_where_exact_is_allowed(make_config):
    assert make_config("sampler=power_mh").sampler.early_reject == "exact"
    assert make_config("sampler=power_mh", "blend=layer", "sampler.proposal=matched").sampler.early_reject == "exact"
    assert make_config("sampler=power_mh", "sampler.rule=published").sampler.early_reject == "off"
    with pytest.raises(ConfigError, match="compares overlaps"):
        make_config("sampler=power_mh", "sampler.rule=published", "sampler.early_reject=exact")


def test_early_rejection_is_no_part_of_the_identity(make_config):
    assert len({identity_hash(make_config("sampler=power_mh", f"sampler.early_reject={name}"))
                for name in ("auto", "off", "exact")}) == 1


@pytest.mark.parametrize("num_steps", [0, 1])
def test_whole_chain_is_extension_and_steps_in_turn(num_steps):
    """Compares the enumerated law of a two-block chain with the product of the matrices of its stages."""
    engine, sampler = engine_of((0, 2)), make(num_steps=num_steps)
    law = law_of(lambda key: engine.run(sampler.chain(PROMPT, 4, key)).trajectory)
    expected = {(): 1.0}
    for horizon in (2, 4):
        expected = stepped(engine, sampler, extended(engine, sampler, expected, horizon), horizon)
    assert abs(sum(law.values()) - 1.0) <= EXACT
    assert total_variation(law, expected) <= EXACT


@pytest.mark.parametrize("seed", range(3))
def test_published_rule_equals_the_published_kernel(seed):
    """Compares the law with that of the published code, computed by `tests/laws.py`."""
    engine = engine_of((0,), seed=seed, vocab_size=2)
    sampler = make(rule="published", num_blocks=2, num_steps=1, proposal_temperature=0.5)
    law = law_of(lambda key: engine.run(sampler.chain(PROMPT, 4, key)).trajectory)
    assert total_variation(law, published_law(engine.model, 4.0, 0.5, blocks=2, block_length=2, steps=1)) <= EXACT


def test_a_law_has_finitely_many_outcomes_and_no_number_twice():
    with pytest.raises(TypeError, match="no finite set of outcomes"):
        law_of(lambda key: key.uniform())
    with pytest.raises(AssertionError, match="is used twice"):
        law_of(lambda key: (key.integer(2), key.integer(2)))


# The floor of `sampler=power_mh`: its margin, its length term, and where `auto` has none.

def floor_of(place: int = 1, log_uniform: float = -0.5, **options):
    sampler, engine = make(**options), engine_of(())
    path = score(engine, (1, 2, 0, 2), sampler.law(), sampler.source())
    return sampler.move().floor(path, 6, place, log_uniform), path


def test_the_margin_of_exact_is_the_rounding_of_the_tokens_that_may_come():
    assert floor_of()[0].margin == pytest.approx(ROUNDING * 4.0 * 5, abs=1e-15)


def test_the_floor_compares_with_the_weight_of_the_current_suffix():
    floor, path = floor_of(place=2)
    assert len(PROMPT) + path.length == 5
    assert (floor.log_uniform, floor.length) == (-0.5, 4)
    assert floor.reference == pytest.approx(4.0 * path.log_p[2:].sum() - path.log_q[2:].sum(), abs=1e-12)
    assert floor.crossed(floor.reference - 0.5 - floor.margin - math.log(4 / 3) - 1e-9, 3)
    assert not floor.crossed(floor.reference - 0.5 - floor.margin - math.log(4 / 3) + 1e-9, 3)


def test_auto_from_python_rejects_early_where_no_blend_matters():
    assert make(early_reject="auto", proposal="matched").rejects_early()
    assert not make(early_reject="auto", proposal="base").rejects_early()
    assert not make(early_reject="off", proposal="matched").rejects_early()
