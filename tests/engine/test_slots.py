"""A slot's record of the tokens in its rows, and the sizes of chunks."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mcmc.engine.slots import Slot, chunks, round_up
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.types import Trajectory


def slot(held) -> Slot:
    made = Slot("tag", iter(()), Draw(Trajectory.start([1]), 5, SamplingParams(), Key(0)), 0.0)
    made.held = np.array(held)
    return made


def test_the_spare_row_gives_back_what_a_draw_overwrote():
    current = np.array([1, 2, 3, 4, 5, 6])
    kept = slot(current)
    assert kept.save(current, 3) == (3, 6)
    kept.held = np.array([1, 2, 3, 9, 9])  # a rejected proposal; the next proposal is cut at 5
    assert kept.restorable(current[:5], 3) == 5
    kept.held = current[:5]
    assert kept.save(current, 5) == (5, 3)  # nothing new to copy
    kept.held = np.array([1, 2, 3, 4, 5, 9])  # another rejected proposal; the next one is cut before the saved tokens
    assert kept.restorable(current[:2], 2) == 2
    assert kept.save(current, 2) == (2, 3)
    assert kept.saved_from == 2


def test_an_accepted_draw_takes_the_place_of_what_was_kept():
    kept = slot([1, 2, 3, 4])
    kept.save(np.array([1, 2, 3, 4]), 2)
    accepted = np.array([1, 2, 7, 8, 9])
    kept.held = accepted
    assert kept.restorable(accepted, 5) == 5
    assert kept.save(accepted, 4) == (4, 5)
    assert kept.saved.tolist() == accepted.tolist()


@pytest.mark.parametrize(("start", "stop", "largest", "expected"), [
    (0, 0, 64, []), (0, 5, 64, [(0, 8)]), (3, 20, 64, [(3, 24)]), (3, 30, 64, [(3, 32)]), (0, 33, 64, [(0, 48)]),
    (0, 70, 64, [(0, 64), (64, 8)]), (0, 12, 64, [(0, 16)]), (0, 100, 32, [(0, 32), (32, 32), (64, 32), (96, 8)])])
def test_chunks_cover_the_span(start, stop, largest, expected):
    assert list(chunks(start, stop, largest)) == expected


def test_round_up():
    assert [round_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
