"""Turns of chains whose steps cost no forward, so that none of them holds up the batch.

A step costs no forward where the stored intervals or a floor answer its operation. Such a chain could go on to its end between
two decode steps of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dflash_mcmc.engine.batching.chains import LiveChain
from dflash_mcmc.ops import Request
from dflash_mcmc.types import ChainResult

TURN_SECONDS = 0.05
"""Time without a forward after which a chain pauses."""


class Turns:
    """Gives chains the answers to complete requests. A chain whose requests stay complete pauses, and others go on.

    Draws are keyed, so that a pause changes no result and no cost.

    Args:
        begin: begins the operations of a new request.
        end: takes the result of a chain that has ended.
        now: a clock, in seconds.

    Attributes:
        paused: the chains that wait for their next turn, the longest wait first. Their requests are complete.
    """

    def __init__(self, begin: Callable[[LiveChain], None], end: Callable[[LiveChain, ChainResult], None],
                 now: Callable[[], float]):
        self.paused: deque[LiveChain] = deque()
        self._begin, self._end, self._now = begin, end, now

    def advance(self, chain: LiveChain) -> None:
        """Gives a chain its answers until a request is not complete, the chain ends or its turn is over."""
        if not chain.complete or chain.ended:
            return
        over = self._now() + TURN_SECONDS
        while self._step(chain):
            if self._now() >= over:
                self.paused.append(chain)
                return

    def resume(self) -> None:
        """Gives chains that have paused a turn, one after another until a turn's time has passed."""
        over = self._now() + TURN_SECONDS
        for _ in range(len(self.paused)):
            self.advance(self.paused.popleft())
            if self._now() >= over:
                return

    def leave(self, chain: LiveChain) -> None:
        """Takes out a chain that has ended."""
        if chain in self.paused:
            self.paused.remove(chain)

    def _step(self, chain: LiveChain) -> bool:
        """Gives a chain the answer to its complete request. Returns whether its next request is complete at once."""
        try:
            request: Request = chain.generator.send(chain.answer())
        except StopIteration as stop:
            self._end(chain, stop.value)
            return False
        chain.ask(request)
        self._begin(chain)
        return chain.complete and not chain.ended
