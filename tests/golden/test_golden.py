"""The stored runs, drawn again on any machine: floats are compared to a tolerance, everything else exactly."""

import pytest

from tests.golden import runs

TOLERANCE = 1e-4
"""Of a float, relative to the larger of 1 and its size: other processors sum in another order."""

QUICK = ("power_mh", "blend_layer_matched", "match_ngram", "rejection_block", "temperature_penalty")
"""Runs that `make test` draws: each kind of sampler, decoder and blend once. `make test-slow` draws all."""
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in runs.RUNS]


def differences(found: dict, name: str) -> list[str]:
    """Where a run differs from the stored one; another folder name is another identity hash."""
    return runs.differences(runs.as_stored(found), runs.stored(name), TOLERANCE, name)


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_records_are_drawn_again(name, tmp_path):
    drawn = runs.draw(name, tmp_path)
    assert differences(drawn, name) == []
    of_samples = [] if name.startswith("probe_") else runs.stored(name)["records"]
    assert [record.get("finish_reason") for record in drawn["records"]][:len(of_samples)] == [
        "stop_id" if record["ended"] else "length" for record in of_samples]


def test_a_difference_is_seen():
    """The comparison itself: floats have a tolerance and everything else has none."""
    stored = {"tokens": [1, 2], "log_p": -1.5, "moved": None}
    assert runs.differences({**stored, "log_p": -1.50001}, stored, TOLERANCE) == []
    for changed in ({"tokens": [1, 3]}, {"tokens": [1]}, {"log_p": -1.51}, {"log_p": -1}, {"moved": 0}, {"more": 1}):
        assert len(runs.differences({**stored, **changed}, stored, TOLERANCE)) == 1
    assert len(runs.differences({**stored, "log_p": -1.50001}, stored, 0.0)) == 1
