"""A decision by hand: what is accepted, what counts as a move, and what the result of a chain says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dflash_mcmc.kernel.metropolis import decide, result
from dflash_mcmc.types import Trajectory


def path(*tokens: int) -> Trajectory:
    zeros = np.zeros(len(tokens))
    return Trajectory.start(np.array([0])).extended(np.array(tokens), zeros, zeros, np.zeros((len(tokens), 2)), False)


STATE, OTHER = path(1, 2), path(1, 3, 4)


@pytest.mark.parametrize(("log_ratio", "decision"), [
    (-0.9, "accept"), (-1.1, "reject"), (-1.0, "reject"), (0.5, "accept"), (-math.inf, "reject"), (math.nan, "reject")])
def test_a_proposal_is_accepted_where_the_uniform_is_below_the_ratio(log_ratio, decision):
    step = decide(STATE, OTHER, 1, log_ratio, -1.0)
    assert (step.decision, step.cut, step.proposal_length) == (decision, 1, 3)
    assert step.trajectory is (OTHER if decision == "accept" else STATE)


def test_an_equal_proposal_is_accepted_but_does_not_move():
    step = decide(STATE, path(1, 2), 1, 0.0, -1.0)
    assert (step.decision, step.accepted, step.moved) == ("identical", True, False)


def test_the_result_counts_each_decision():
    steps = [decide(STATE, other, 0, ratio, -1.0) for other, ratio in ((OTHER, 0.0), (STATE, 0.0), (OTHER, -2.0))]
    found = result(STATE, [*steps, steps[-1]._replace(decision="abandon")], 0.25, [{"block": 1}])
    assert (found.proposals, found.accepted, found.moved, found.abandoned, found.law_error) == (4, 2, 1, 1, 0.25)
    assert found.trace == ({"block": 1},)
