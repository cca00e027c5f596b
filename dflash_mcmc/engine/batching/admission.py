"""The chains that wait to begin, and the prompts that are read for them ahead."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import NamedTuple

import numpy as np

from dflash_mcmc.engine.batching.interface import DROPPED, Finished
from dflash_mcmc.engine.batching.slot_memory import PromptReader
from dflash_mcmc.ops import Chain, Request, Together
from dflash_mcmc.types import ChainResult, Cost


class Next(NamedTuple):
    """A waiting chain with its first request, or a chain that has ended without any request, with its result."""

    tag: Hashable
    chain: Chain
    request: Request | None
    result: ChainResult | None


class AdmissionQueue:
    """Gives out chains in their order.

    Args:
        chains: (tag, generator) pairs, or None where no chain waits now and others may follow.
        prompts: reads the prompts of the next chains; None if each slot reads its own prompt.
        was_read: called after each reading with the number of tokens, the number of forwards and the start time.

    Attributes:
        seconds_each: the latest reading's seconds, divided among the chains that it was for.
    """

    def __init__(self, chains: Iterable[tuple[Hashable, Chain] | None], prompts: PromptReader | None,
                 was_read: Callable[[int, int, float], None]):
        self._chains, self._prompts, self._was_read = iter(chains), prompts, was_read
        self._ahead: deque[Next] = deque()
        self._drained = self._paused = False
        self.seconds_each = 0.0

    @property
    def more(self) -> bool:
        """Whether another chain may follow."""
        return bool(self._ahead) or not self._drained

    @property
    def reads_next(self) -> bool:
        """Whether `next` reads prompts first."""
        return not self._ahead and not self._drained

    @property
    def arrived(self) -> bool:
        """Whether a chain waits now, after `chains` had none for a while."""
        if self._paused and not self._ahead:
            self._look_ahead()
        return bool(self._ahead)

    def drop(self, tags: Collection[Hashable]) -> list[Finished]:
        """Ends waiting chains before they begin."""
        out = [entry for entry in self._ahead if entry.tag in tags]
        self._ahead = deque(entry for entry in self._ahead if entry.tag not in tags)
        for entry in out:
            entry.chain.close()
        return [Finished(entry.tag, None, Cost(), 0.0, 0.0, DROPPED) for entry in out]

    def next(self) -> Next | None:
        """The next chain; None after the last."""
        if not self._ahead and not self._drained:
            self._look_ahead()
        return self._ahead.popleft() if self._ahead else None

    def read(self) -> None:
        """Reads the prompts of the waiting chains, except those already read."""
        if self._prompts:
            started = time.perf_counter()
            prompts = [prompt for entry in self._ahead if (prompt := prompt_of(entry.request)) is not None]
            self._was_read(*self._prompts.read(prompts), started)
            self.seconds_each = (time.perf_counter() - started) / max(1, len(self._ahead))

    def _look_ahead(self) -> None:
        limit, self._paused = self._prompts.num_rows if self._prompts else 1, False
        for arrival in self._chains:
            if arrival is None:
                self._paused = True
                break
            tag, chain = arrival
            try:
                self._ahead.append(Next(tag, chain, next(chain), None))
            except StopIteration as stop:
                self._ahead.append(Next(tag, chain, None, stop.value))
            if len(self._ahead) == limit:
                break
        else:
            self._drained = True
        if self._ahead or not self._paused:
            self.read()


def prompt_of(request: Request | None) -> np.ndarray | None:
    """The prompt of a request's first operation; None without an operation."""
    operations = request.operations if isinstance(request, Together) else (request,)
    return operations[0].trajectory.prompt if operations and operations[0] is not None else None
