"""The cosine schedule. `test_target.py` tests the other schedule."""

from __future__ import annotations

import pytest

from dflash_mcmc.train.loop import cosine


def test_cosine_rises_and_falls_to_zero():
    rates = [cosine(step, 100, 2.0, 0.04) for step in range(101)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[52] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0)
    assert sorted(rates[4:], reverse=True) == rates[4:]
    assert cosine(0, 100, 2.0, 0.0) == 2.0
