"""Power sampling with speculative decoding: the exact transition matrix equals that with plain decoding."""

import numpy as np
import pytest

from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.engine.speculative.rules import Speculation
from dflash_mcmc.sampler.power_mh import PowerMH
from dflash_mcmc.testing import transition_matrix
from tests.sampler.stages import matrix_error, step_matrix
from tests.sampler.test_draft_mh_decoder import RULES

MODEL = TabularModel(3, (0,), seed=0, scale=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "early_reject"), [
    ("match", "exact"), ("match_sampled", "off"), ("rejection", "off"), ("block", "exact")])
def test_power_mh_keeps_its_law(name, early_reject):
    rule, options = RULES[name]
    sampler, off = (PowerMH(num_blocks=1, num_steps=1, early_reject=early) for early in (early_reject, "off"))
    plain, target = step_matrix(TabularEngine(MODEL), off, 2)
    speculation = Speculation(rule, TabularDraft(3, 2, seed=4), noisy=True, **options)
    matrix = transition_matrix(TabularEngine(MODEL, None, speculation), sampler, 2, target)
    assert np.abs(matrix - plain).max() <= 1e-12  # the same transition matrix, not only the same invariant law
    assert matrix_error(matrix, target) <= 1e-12
