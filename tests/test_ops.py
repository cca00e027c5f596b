"""Definitions of `ops` as literal values. All engines use them, so a comparison of engines cannot test them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dflash_mcmc.ops import Floor, SamplingParams, grid_origin, grid_slot
from dflash_mcmc.types import Trajectory


def path(prompt: int, generated: int) -> Trajectory:
    """A trajectory of these lengths, with log p -1, -2, ... and log q -0.5."""
    start = Trajectory.start(np.arange(prompt))
    log_p = -np.arange(1.0, generated + 1.0)
    return start.extended(np.arange(generated), log_p, np.full(generated, -0.5), np.zeros((generated, 2)), False, None, None)


def test_the_grid_starts_at_the_first_generated_token_or_where_the_operation_starts():
    assert grid_origin(False, path(3, 0)) == grid_origin(False, path(3, 2)) == 3
    assert grid_origin(True, path(3, 0)) == 3
    assert grid_origin(True, path(3, 2)) == 5


def test_the_first_slot_of_each_block_is_an_anchor():
    assert [grid_slot(number, 4) for number in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_a_floor_by_hand():
    floor = Floor(log_uniform=-1.0, alpha=2.0, reference=-3.0, length=4, margin=0.25)
    assert floor.weights(path(3, 3), 1).tolist() == [2.0 * -2.0 + 0.5, 2.0 * -5.0 + 1.0]
    assert floor.bound(-4.0, 2) == pytest.approx(-4.0 + 3.0 + math.log(2.0))
    assert floor._replace(length=None).bound(-4.0, 2) == -1.0
    # b + 0.25 <= -1, and b = weight + 3 + log(4 / 8)
    edge = -1.25 - 3.0 + math.log(2.0)
    assert floor.crossed(edge - 1e-9, 8)
    assert not floor.crossed(edge + 1e-9, 8)


def test_which_parameters_truncate_and_which_read_earlier_tokens():
    assert [SamplingParams(**given).truncates for given in (
        {}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 2.0})] == [
            False, True, True, True, True, False]
    assert [SamplingParams(**given).has_penalty for given in (
        {}, {"temperature": 0.5}, {"repetition_penalty": 2.0}, {"frequency_penalty": -1.0}, {"presence_penalty": 1.0})] == [
            False, False, True, True, True]
