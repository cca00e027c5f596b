"""Cuts at jumps of the entropy: `power_mh cut=entropy` by enumeration, mistakes that the tests catch, early rejection."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dflash_mcmc import kernel
from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.power_mh import PowerMH
from dflash_mcmc.testing import PROMPT, balance_error, invariance_error, power_target, score, transition_matrix
from tests.composing import composed
from tests.sampler.test_power_mh import engine_of, make

EXACT, WRONG = 1e-12, 1e-3


def entropy_cut(cls=PowerMH, **changes):
    return make(cls, **{"cut": "entropy", "entropy_power": 2.0, "proposal_temperature": 0.5, **changes})


def errors(sampler, engine, horizon):
    target = power_target(engine, horizon, sampler.alpha, sampler.law(), "blended")
    matrix = transition_matrix(engine, sampler, horizon, target)
    assert np.abs(matrix.sum(axis=1) - 1.0).max() <= EXACT
    return max(invariance_error(matrix, target), balance_error(matrix, target)), matrix


@pytest.mark.parametrize("power", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("stop_ids", [(), (0,), (0, 2)])
@pytest.mark.parametrize("seed", [0, 3])
def test_a_step_leaves_the_power_law_invariant_and_reaches_every_state(power, stop_ids, seed):
    engine = engine_of(stop_ids, seed=seed, scale=1.5)
    error, matrix = errors(entropy_cut(entropy_power=power), engine, 3)
    assert error < EXACT
    assert (np.linalg.matrix_power(matrix, 3) > 0.0).all()


@pytest.mark.parametrize("changes", [{"proposal_temperature": None}, {"proposal_temperature": 1.0}, {"alpha": 2.0}], ids=str)
def test_exact_early_rejection_leaves_the_power_law_invariant(changes):
    assert errors(entropy_cut(early_reject="exact", **changes), engine_of(scale=1.5), 4)[0] < EXACT


class WithoutTheCut(PowerMH):
    """Forgets that the cut has another probability in the proposal."""

    __slots__ = ()

    def log_cut(self, path, proposal, cut):
        return 0.0


class AsUniform(PowerMH):
    """Takes the length term of uniform cuts."""

    __slots__ = ()

    def log_cut(self, path, proposal, cut):
        return math.log(path.length / proposal.length)


@pytest.mark.parametrize("cls", [WithoutTheCut, AsUniform])
def test_mutants_are_wrong(cls):
    assert errors(entropy_cut(cls, alpha=2.0), engine_of(seed=1, scale=3.0), 3)[0] > WRONG


class TooStrictBound(PowerMH):
    """Abandons proposals as if their cuts could not be more probable than the state's."""

    __slots__ = ()

    def floor(self, path, horizon, cut, log_uniform):
        floor = PowerMH.floor(self, path, horizon, cut, log_uniform)
        most, _ = kernel.cut_bound(path, cut, self.entropy_power)
        return floor._replace(reference=floor.reference + most)


def test_early_rejection_needs_the_bound():
    sampler = entropy_cut(TooStrictBound, early_reject="exact", proposal_temperature=1.0, alpha=2.0)
    assert errors(sampler, engine_of(seed=1, scale=3.0), 4)[0] > WRONG


def with_entropies(values):
    engine = engine_of(())
    path = score(engine, [0] * len(values), make().law(), "blended")
    return path._replace(entropy=np.array(values))


def test_probabilities_by_hand():
    path = with_entropies([1.0, 3.0, 2.0, 3.0])
    np.testing.assert_allclose(kernel.cut_probabilities(path, 2.0), np.array([1.0, 4.0, 0.0, 1.0]) / 6.0)
    np.testing.assert_allclose(kernel.cut_probabilities(path, 0.0), np.array([1.0, 1.0, 0.0, 1.0]) / 3.0)
    other = with_entropies([1.0, 3.0, 5.0, 0.0])
    assert kernel.log_cut_ratio(path, other, 1, 2.0) == pytest.approx(math.log(6.0 / 9.0))
    assert kernel.cut_bound(path, 1, 2.0) == (pytest.approx(math.log(6.0 / 5.0)), None)


def test_a_state_without_jumps_has_uniform_cuts():
    """A model that is certain of all its tokens so far. A proposal with a jump elsewhere is never cut where this one was."""
    flat, rising = with_entropies([0.0, 0.0, 0.0]), with_entropies([0.0, 0.0, 1.0])
    np.testing.assert_allclose(kernel.cut_probabilities(flat, 4.0), [1 / 3] * 3)
    assert kernel.log_cut_ratio(flat, rising, 1, 4.0) == -math.inf
    assert kernel.log_cut_ratio(flat, with_entropies([0.0, 0.0]), 1, 4.0) == pytest.approx(math.log(3 / 2))
    assert kernel.cut_bound(flat, 1, 4.0) == (0.0, 3)


def test_trajectories_without_entropies_are_refused():
    path = with_entropies([1.0])._replace(entropy=None)
    with pytest.raises(ValueError, match="entropies"):
        kernel.cut_probabilities(path, 1.0)


def test_early_rejection_changes_nothing_and_saves_tokens():
    engine = TabularEngine(TabularModel(4, (0,), seed=3, scale=2.0))
    abandoned = 0
    for seed in range(60):
        samplers = (entropy_cut(num_steps=4, early_reject=mode, proposal_temperature=1.0) for mode in ("off", "exact"))
        off, on = (engine.run(sampler.chain(PROMPT, 8, Key(seed))) for sampler in samplers)
        np.testing.assert_array_equal(on.trajectory.tokens, off.trajectory.tokens)
        assert (on.accepted, on.moved) == (off.accepted, off.moved)
        abandoned += on.abandoned
    assert abandoned > 50


@pytest.mark.parametrize(("overrides", "field"), [
    (["sampler.cut=entropy", "sampler.entropy_power=-1"], "sampler.entropy_power: given -1.0"),
    (["sampler.cut=entropy", "sampler.rule=published"], "sampler.cut: given 'entropy'"),
    (["sampler.cut=entropy", "blend=draft", "draft=tiny", "blend.grid=cut", "sampler.rescore=true"],
     "sampler.cut: given 'entropy'")])
def test_bad_values_are_one_line(tmp_path, overrides, field):
    with pytest.raises(ConfigError) as refused:
        composed(tmp_path, "sampler=power_mh", *overrides)
    assert str(refused.value).startswith(field)
    assert "\n" not in str(refused.value)


def test_the_power_of_jumps_is_part_of_the_identity_only_with_entropy_cuts(tmp_path):
    from dflash_mcmc.config.identity import identity_of

    plain, other = (identity_of(composed(tmp_path, "sampler=power_mh", f"sampler.entropy_power={power}")) for power in (4, 2))
    assert plain == other
    assert "sampler.entropy_power" not in plain
    cut = identity_of(composed(tmp_path, "sampler=power_mh", "sampler.cut=entropy", "sampler.entropy_power=2"))
    assert cut["sampler.entropy_power"] == 2.0
