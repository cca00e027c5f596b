"""A chain's trace survives the record; log p changes only if the state does."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mcmc.kernel import MetropolisStep, result, trace_entry
from dflash_mcmc.probe.mixing.chains import DECISIONS, cell_record, cells_of
from dflash_mcmc.types import Cost, Trajectory


def path_of(log_p: list[float]) -> Trajectory:
    """A sequence whose tokens have these log-probabilities."""
    return Trajectory.start(np.array([1])).extended(np.arange(len(log_p)), np.array(log_p), np.array(log_p),
                                              np.zeros((len(log_p), 2)), False)


STEPS = [MetropolisStep(path_of([-1.0, -1.0, -0.3]), 1, 3, 0.25, "accept"),
         MetropolisStep(path_of([-1.0, -1.0, -0.300001234]), 2, 3, 0.0, "identical"),
         MetropolisStep(path_of([-1.0, -1.0, -0.300001234, -0.5]), 0, 2, -3.123456789, "abandon"),
         MetropolisStep(path_of([-1.0, -1.0, -0.300001234, -0.5]), 3, 5, -1.5, "reject")]


@pytest.fixture
def record() -> dict:
    """A chain of two stages: the state has 2 tokens, moves to 3, is proposed again, grows to 4 and stays."""
    trace = [trace_entry(step, block, number, length) for step, block, number, length in
             zip(STEPS, (1, 1, 2, 2), (1, 2, 1, 2), (2, 3, 4, 4), strict=True)]
    found = cell_record((4.0, 0.25, "exact"), result(STEPS[-1].trajectory, STEPS, 0.0, trace), Cost(12, 9, 30, 4), "")
    failed = cell_record((4.0, 1.0, "off"), None, Cost(token_forwards=7), "no numbers")
    return {"problem": "a", "chain": 3, "cells": [found, failed]}


def test_a_record_stores_the_trace_by_column(record):
    found = record["cells"][0]
    assert found["trace"]["decision"] == "aixr"
    assert found["trace"]["cut"] == [1, 2, 0, 3]
    assert found["trace"]["log_ratio"] == [0.25, 0.0, -3.12346, -1.5]
    assert {name: found[name] for name in ("alpha", "temperature", "early_reject", "num_tokens", "log_p", "proposals",
                                           "accepted", "moved", "abandoned", "tokens_drawn", "token_forwards")} == {
        "alpha": 4.0, "temperature": 0.25, "early_reject": "exact", "num_tokens": 4, "log_p": -2.8, "proposals": 4,
        "accepted": 2, "moved": 1, "abandoned": 1, "tokens_drawn": 12, "token_forwards": 30}
    assert record["cells"][1] == {"alpha": 4.0, "temperature": 1.0, "early_reject": "off", "failure": "no numbers",
                                  "tokens_drawn": 0, "tokens_skipped": 0, "token_forwards": 7, "target_forwards": 0}


def test_the_chains_of_a_cell_are_read_back(record):
    cell, failed = cells_of([record])
    (chain,) = cell.chains
    assert (chain.problem, chain.number, chain.num_steps, cell.num_failed) == ("a", 3, 4, 0)
    assert (failed.chains, failed.num_failed, failed.temperature) == ([], 1, 1.0)
    assert chain.moved.tolist() == [True, False, False, False]
    assert chain.accepted.tolist() == [True, True, False, False]
    steps = cell.steps()
    assert steps.problem == ["a"] * 4
    assert steps.identical.tolist() == [False, True, False, False]
    assert steps.abandoned.tolist() == [False, False, True, False]
    assert steps.real.all()
    assert cell.problems == {"a": [chain]}
    assert failed.steps().problem == []


def test_log_p_of_an_unchanged_sequence_is_constant(record):
    """The step that proposes the state itself has a slightly different log p from rounding; after it the state grows."""
    record["cells"][0]["trace"]["log_p"] = [-2.3, -2.30001, -2.8, -2.80003]
    (chain,) = cells_of([record])[0].chains
    assert chain.log_p.tolist() == [-2.3, -2.3, -2.8, -2.8]
    record["cells"][0]["trace"].update(decision="aara", proposal_length=[3, 3, 2, 4], log_p=[-2.3, -2.4, -2.8, -2.9])
    assert cells_of([record])[0].chains[0].log_p.tolist() == [-2.3, -2.4, -2.8, -2.9]  # a move to the same number of tokens


def test_every_decision_of_the_kernel_has_a_letter():
    assert len(set(DECISIONS.values())) == len(DECISIONS)
    assert set(DECISIONS) == {step.decision for step in STEPS}
