"""Records with the counts of the guided-power-sampling document; `tests/report/test_build.py` has its tables."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from dflash_mcmc.engine.batching.interface import Finished
from dflash_mcmc.runner.samples import record_of
from dflash_mcmc.types import ChainResult, Cost, Grade, Problem, Trajectory
from tests import published


@pytest.mark.parametrize("name", published.CONDITIONS)
def test_records_are_consistent(name):
    """Verdicts, answers, lengths and counts agree with each other."""
    for record in published.records(name):
        assert json.loads(json.dumps(record)) == record
        assert (record["verdict"] == "no_answer") == (record["answer"] is None)
        assert (record["verdict"] == "correct") == (record["answer"] == record["gold"])
        assert len(record["tokens"]) == record["num_tokens"] <= 1024
        assert record["moved"] <= record["accepted"] <= record["proposals"] == len(record["trace"])
        assert all(0 <= entry["cut"] < entry["length"] for entry in record["trace"])


def test_records_have_the_fields_of_real_ones():
    """The order of the fields is that of recorded runs."""
    path = Trajectory.start(np.array([1])).extended(np.array([2]), np.zeros(1), np.zeros(1), np.zeros((1, 2)), True)
    done = Finished(0, ChainResult(path), Cost(), 1.0, 1.0)
    real = record_of(Problem("a", "question", "1"), 0, np.array([1]), Grade("correct", "1"), done,
                     SimpleNamespace(decode=str, stop_ids=()), "math 2")
    assert list(published.records("ps")[0]) == list(real)
