"""Checkpoints with random damage: a run ends in a result or in one line, in bounded time, and never runs planted code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from tests.model.damage import all_ways
from tests.model.trying import Tried, tried
from tests.processes import ROOT

SEED = 22
SHORT, LONG = 12, 700


@pytest.mark.parametrize("damage", [pytest.param(damage, id=damage.name[:60].encode("unicode_escape").decode())
                                    for damage in all_ways(SEED, SHORT)])
def test_a_damaged_checkpoint_is_one_line_or_runs(damage, tmp_path, random_weights):
    found = tried(damage, tmp_path)
    assert found.outcome in ("ran", "refused"), found


@pytest.mark.slow
def test_many_damaged_checkpoints(capsys):
    """The campaign runs in a program of its own, because a damage that kills it must not end the tests."""
    results: dict[int, Tried] = {}
    first = 0
    while first < LONG:
        command = [sys.executable, "-m", "tests.model.trying", *map(str, (SEED, LONG, first))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7200)
        for line in done.stdout.splitlines():
            number, *fields = json.loads(line)
            results[number] = Tried(*fields)
        if done.returncode:
            dead = max(results, default=-1) + 1
            results[dead] = Tried(all_ways(SEED, LONG)[dead].name, "fault", done.stderr[-400:], 0.0)
        first = max(results) + 1
    with capsys.disabled():
        print(Counter(found.outcome for found in results.values()))
    assert len(results) == LONG
    assert [found for found in results.values() if found.outcome == "fault"] == []
