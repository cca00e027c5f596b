"""Engines that carry out the operations of their chains elsewhere, in vLLM or on a server, and their chains in progress."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from dflash_mcmc.engine.batching.chains import LiveChain
from dflash_mcmc.engine.batching.interface import DROPPED, NOT_NUMBERS, Finished, Meter, MeteredEngine, Tag
from dflash_mcmc.engine.batching.scheduler import Turns
from dflash_mcmc.ops import Chain
from dflash_mcmc.types import ChainResult, Cost, Trajectory


class Asked(NamedTuple):
    """A request in progress: the operation of a chain, and the trajectory that the request goes on from."""

    chain: LiveChain
    number: int
    base: Trajectory


class DelegatingEngine(MeteredEngine):
    """Runs chains whose operations are requests to something else.

    Args:
        num_chains: chains in progress at once.
    """

    def __init__(self, num_chains: int):
        super().__init__()
        self._num_chains, self._asked = num_chains, dict[Any, Asked]()

    def steps(self, chains: Iterable[tuple[Tag, Chain] | None]) -> Generator[Finished[Tag] | None, None, None]:
        """Like `run`, but also yields None after every step, to let the caller do something else in between."""
        self._meter.reset_clock()
        self._dropped.clear()
        run = LiveChains(iter(chains), self._num_chains, self._begin, self._meter)
        try:
            yield from run.fill()
            while run.live:
                self._step(run)
                run.drop(self._dropped)
                self._dropped.clear()
                self._abort([request for request, asked in self._asked.items() if asked.chain.ended])
                yield from run.fill()
                yield None
        finally:
            self._abort(list(self._asked))

    @abstractmethod
    def _begin(self, chain: LiveChain) -> None:
        """Asks for the operations of a chain's new request, but for those that are answered at once."""

    @abstractmethod
    def _step(self, run: LiveChains) -> None:
        """Gives chains the answers to requests that have ended, and takes these out of `_asked`."""

    @abstractmethod
    def _abort(self, requests: list[Any]) -> None:
        """Ends requests, and takes them out of `_asked`."""


class LiveChains:
    """The chains of one run, for an engine whose operations are carried out elsewhere.

    Args:
        chains: as of `ChainRunner.run`.
        num_chains: chains in progress at once.
        begin: begins the operations of a chain's new request.

    Attributes:
        live: chains in progress.
        more: whether another chain may wait.
    """

    def __init__(self, chains: Iterator[tuple[Hashable, Chain] | None], num_chains: int, begin: Callable[[LiveChain], None],
                 meter: Meter):
        self.live, self.more = set[LiveChain](), True
        self._chains, self._num_chains, self._begin, self._meter = chains, num_chains, begin, meter
        self._turns = Turns(begin, self._end, meter.now)
        self._finished: list[Finished] = []
        self._clocks: dict[LiveChain, float] = {}

    def fill(self) -> list[Finished]:
        """Goes on with chains that have paused, and begins chains while there is room. Returns the chains that have ended."""
        self._turns.resume()
        while self.more and len(self.live) < self._num_chains:
            try:
                entry = next(self._chains)
            except StopIteration:
                self.more = False
                break
            if entry is None:  # no chain waits now
                break
            self._admit(*entry)
        finished, self._finished = self._finished, []
        return finished

    def end(self, chain: LiveChain, number: int, answer: Trajectory | None, failure: str = NOT_NUMBERS) -> None:
        """Gives a chain the answer to an operation of its request; None ends it, for this reason."""
        if chain.ended:
            return
        if answer is None:
            self._give_up(chain, failure)
            return
        chain.note(number, answer)
        self._turns.advance(chain)

    def fail(self, chain: LiveChain, error: Exception) -> None:
        """Raises an error in a chain. One that catches it ends, and another ends the run."""
        if chain.ended:
            return
        with contextlib.suppress(StopIteration):
            chain.generator.throw(error)
        self._give_up(chain, str(error))

    def drop(self, tags: Collection[Hashable]) -> None:
        """Ends chains before their end."""
        for chain in [chain for chain in self.live if chain.tag in tags]:
            self._give_up(chain, DROPPED)

    def _give_up(self, chain: LiveChain, reason: str) -> None:
        chain.generator.close()
        chain.settle()
        self._end(chain, None, reason)

    def _admit(self, tag: Hashable, generator: Chain) -> None:
        try:
            request = next(generator)
        except StopIteration as stop:
            self._finished.append(Finished(tag, stop.value, Cost(), 0.0, 0.0))
            return
        chain = LiveChain(tag, generator)
        self.live.add(chain)
        self._clocks[chain] = self._meter.clock
        chain.ask(request)
        self._begin(chain)
        self._turns.advance(chain)

    def _end(self, chain: LiveChain, result: ChainResult | None, failure: str = "") -> None:
        self.live.remove(chain)
        self._turns.leave(chain)
        chain.seconds = self._meter.clock - self._clocks.pop(chain)
        self._finished.append(chain.finished(result, failure))
