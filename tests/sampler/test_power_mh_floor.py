"""The floor of `sampler=power_mh`: its margin, its length term, and where `auto` has none."""

from __future__ import annotations

import math

import pytest

from dflash_mcmc.kernel import ROUNDING
from tests.sampler.test_power_mh import NOT_EXACT, PROMPT, check_step, engine_of, make, score, target_by_hand


def floor_of(place: int = 1, log_uniform: float = -0.5, **options):
    sampler, engine = make(**options), engine_of(())
    path = score(engine, (1, 2, 0, 2), sampler.law(), sampler.source())
    return sampler.floor(path, 6, place, log_uniform), path


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
