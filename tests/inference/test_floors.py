"""Early rejection on the device: its floors are those that `ops.Floor` defines, and `eps` decides as `off` does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dflash_mcmc.inference.draws import start_of
from dflash_mcmc.inference.rows import Rows
from dflash_mcmc.inference.speculative.commit import below_floor
from dflash_mcmc.ops import Draw, Floor, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.types import Trajectory
from tests.inference.test_batched import BLENDS, TOLERANCE, power_mh, run_batched, same
from tests.targets import random_model, rows_do_not_depend_on_the_batch


@pytest.fixture(scope="module")
def qwen3():
    return random_model("qwen3")


@pytest.mark.parametrize("length", [None, 3, 9])
@pytest.mark.parametrize("margin", [0.0, 2.5])
def test_a_row_is_below_its_floor_exactly_where_the_floor_is_crossed(length, margin):
    """b_t + margin <= log u, with b_t = W_t - reference + log(length / t), for weights on both sides of it."""
    prompt, horizon = np.arange(4), 12
    floor = Floor(log_uniform=-0.7, alpha=2.0, reference=1.3, length=length, margin=margin)
    draw = Draw(Trajectory.start(prompt), horizon, SamplingParams(), Key(0), floor=floor)
    state = Rows(1, 20, 5, torch.device("cpu"))
    state.begin([start_of(draw, draw.trajectory, 0, np.full(horizon, 0.5), len(prompt))])
    found = set()
    for generated in range(1, horizon + 1):
        edge = -0.7 + 1.3 - margin - (math.log(length / generated) if length else 0.0)
        for weight in (edge - 0.1, edge + 0.1):
            at = torch.tensor([[len(prompt) + generated - 1]])
            below = bool(below_floor(state, at, torch.tensor([[weight]], dtype=torch.float64)))
            assert below == floor.crossed(weight, generated) == (weight < edge)
            found.add(below)
    assert found == {True, False}


@pytest.mark.parametrize("cut", ["current", "horizon"])
def test_a_small_epsilon_decides_as_without_early_rejection(qwen3, cut):
    """At epsilon 1e-5 none of these decisions is wrong. Proposals are hotter than p, where `exact` would not hold."""
    options = dict(proposal="matched", proposal_temperature=2.0, alpha=3.0, num_steps=6, cut=cut, epsilon=1e-5)
    eps, off = (run_batched(qwen3, power_mh(early_reject=name, **options), BLENDS["layer"]) for name in ("eps", "off"))
    assert sum(done.result.abandoned for done in eps.values()) >= 20
    assert sum(done.result.moved for done in off.values()) >= 10
    for tag, done in eps.items():
        same(off[tag].result, done.result, 0.0 if rows_do_not_depend_on_the_batch() else TOLERANCE)
        for early, full in zip(done.result.trace, off[tag].result.trace, strict=True):
            assert early["decision"] == full["decision"] or (early["decision"], full["decision"]) == ("abandon", "reject")
