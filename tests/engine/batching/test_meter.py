"""The engine's time is divided among chains, and reading is a part of it."""

from types import SimpleNamespace

from dflash_mcmc.engine.batching import interface
from dflash_mcmc.engine.batching.chains import Slot


def test_reading_is_the_part_of_a_chains_share_in_which_tokens_were_read(monkeypatch):
    now = iter([1.0, 9.0, 2.0, 5.0, 5.5, 8.0])
    monkeypatch.setattr(interface.time, "perf_counter", lambda: next(now))
    counted, chain = interface.Meter(), SimpleNamespace(seconds=0.0, prefill_seconds=None)
    early, late = Slot(chain), Slot(chain)
    early.begin(counted)
    counted.count_reading(7, 1, started=0.0)  # 1 s
    counted.count_reading(5, 1, started=9.0, ahead=True)  # prompts of other chains
    counted.share(0.0, 2)  # a step of 2 s of two chains
    late.begin(counted)
    counted.share(2.0, 3)  # a step of 3 s without reading
    counted.count_reading(3, 1, started=5.0)  # 0.5 s
    counted.share(5.0, 1)  # a step of 3 s of one chain
    late.charge(counted)
    assert (chain.seconds, chain.prefill_seconds) == (4.0, 0.5)
    early.charge(counted)
    assert (chain.seconds, chain.prefill_seconds) == (4.0 + 5.0, 0.5 + 1.0)
    counted.reset_clock()
    assert (counted.clock, counted.reading_clock, counted.counters.read_seconds) == (0.0, 0.0, 1.5)
