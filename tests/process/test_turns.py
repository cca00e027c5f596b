"""Threads take turns, and a thread does not wait for itself."""

from __future__ import annotations

import threading

from dflash_mcmc.process.turns import Turn
from tests.refusals import refused


def test_another_thread_waits():
    turn, order = Turn(), []

    def other() -> None:
        with turn.taken(nests=True):
            order.append("other")

    with turn.taken(nests=False):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.05)
        order.append("this")
    thread.join()
    assert order == ["this", "other"]


def test_the_same_thread_nests_or_is_refused():
    turn = Turn()
    with turn.taken(nests=False):
        with turn.taken(nests=True):
            pass
        with refused(start="engine: given a second call while a stream of the same model is open"), turn.taken(nests=False):
            pass
    with turn.taken(nests=False):
        pass


def test_another_thread_can_end_a_turn():
    turn = Turn()
    taken = turn.taken(nests=False)
    thread = threading.Thread(target=taken.__enter__)
    thread.start()
    thread.join()
    taken.__exit__(None, None, None)
    with turn.taken(nests=False):
        pass
