"""The rate that a run prints at its end: the token-forwards of its own records over the time after loading."""

from __future__ import annotations

import re

from dflash_mcmc.runner import tracking
from tests.runs import execute


def test_rate(monkeypatch):
    seconds = iter((100.0, 104.0))
    monkeypatch.setattr(tracking.time, "monotonic", lambda: next(seconds))
    measured = tracking.Rate()
    measured.add({"token_forwards": 6000.0})
    measured.add({"token_forwards": 2000.0})
    measured.add({"problem": "a unit of a probe"})
    assert measured.text() == ("2,000 token-forwards per second; hardware.tokens_per_second=2000 gives a dry run its hours")


def test_without_forwards_nothing_is_printed(tmp_path, capsys):
    tracking.Rate().tell(tmp_path)
    assert capsys.readouterr().err == ""


def test_in_a_launch_it_is_that_of_one_process(monkeypatch):
    monkeypatch.setattr(tracking.ranks, "world_size", lambda: 2)
    measured = tracking.Rate()
    measured.add({"token_forwards": 1.0})
    assert "per second of this process; " in measured.text()


def test_a_run_prints_it_once_and_a_complete_run_does_not(make_config, capsys):
    config = make_config("experiment=demo", "condition=greedy", "dataset.limit=1")
    execute(config)
    (shown,) = re.findall(r"hardware.tokens_per_second=(\d+)", capsys.readouterr().err)
    assert int(shown) > 0
    execute(config)
    assert "tokens_per_second" not in capsys.readouterr().err
