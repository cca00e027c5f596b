"""Power sampling with speculative decoding: the exact transition matrix equals that with plain decoding."""

import numpy as np
import pytest

from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.rules import Speculation
from dflash_mcmc.sampler.power_mh import PowerMH
from dflash_mcmc.testing import balance_error, invariance_error, power_target, transition_matrix

HORIZON = 2
MODEL = TabularModel(3, (0,), seed=0, scale=0.5)
DRAFT = TabularDraft(3, 2, seed=4)


def sampler(early_reject: str) -> PowerMH:
    return PowerMH(num_blocks=1, num_steps=1, early_reject=early_reject)


def matrix_and_target(rule, sampler, **options):
    engine = TabularEngine(MODEL, None, Speculation(rule, DRAFT, noisy=True, **options))
    target = power_target(TabularEngine(MODEL), HORIZON, sampler.alpha, sampler.law(), sampler.source())
    return transition_matrix(engine, sampler, HORIZON, target), target


RULES = {"match": (rules.match, {"shared_noise": True, "temperature": 0.0}),
         "match_sampled": (rules.match, {"shared_noise": True, "temperature": 1.0}),
         "rejection": (rules.reject, {"shared_noise": False, "temperature": None}),
         "block": (rules.reject_block, {"shared_noise": False, "temperature": None})}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "early_reject"), [
    ("match", "exact"), ("match_sampled", "off"), ("rejection", "off"), ("block", "exact")])
def test_power_mh_keeps_its_law(name, early_reject):
    rule, options = RULES[name]
    matrix, target = matrix_and_target(rule, sampler(early_reject), **options)
    plain = transition_matrix(TabularEngine(MODEL), sampler("off"), HORIZON, target)
    assert np.abs(matrix - plain).max() <= 1e-12  # the same transition matrix, not only the same invariant law
    assert max(invariance_error(matrix, target), balance_error(matrix, target)) <= 1e-12
