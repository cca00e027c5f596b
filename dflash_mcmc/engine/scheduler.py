"""Continuous batching: a slot that becomes free takes the next waiting chain before the next step."""

from __future__ import annotations

import time
from collections.abc import Generator, Hashable, Iterable, Iterator

from dflash_mcmc.engine.decode_loop import DecodeLoop, EndedDraw
from dflash_mcmc.engine.interface import NOT_NUMBERS, Finished
from dflash_mcmc.engine.meter import Meter
from dflash_mcmc.engine.operations import Operations, UnusableLogits
from dflash_mcmc.engine.rows import Status
from dflash_mcmc.engine.slot_memory import SlotMemory
from dflash_mcmc.engine.slots import Slot
from dflash_mcmc.engine.waiting import Waiting
from dflash_mcmc.ops import Chain
from dflash_mcmc.types import ChainResult, Cost, Trajectory


class Scheduler:
    """Admits chains to slots, gives them their answers, and takes them out when they end.

    Once no chain waits, the last live row moves into the gap of a chain that ends. Live rows therefore stay contiguous.

    Args:
        chains: (tag, generator) pairs.
        num_slots: chains in the batch at once.
        operations: carries out the operations of chains.
        memory, loop: hold the state of the rows.
        meter: counts the work and measures time.
    """

    def __init__(self, chains: Iterable[tuple[Hashable, Chain]], num_slots: int, operations: Operations, memory: SlotMemory,
                 loop: DecodeLoop, meter: Meter):
        self.slots: list[Slot] = []
        self._num_slots, self._operations, self._memory, self._loop, self._meter = num_slots, operations, memory, loop, meter
        self._waiting = Waiting(chains, memory.prompts, self._count_prompts)

    @property
    def busy_slots(self) -> int:
        """The number of slots while chains may wait; 0 afterwards."""
        return self._num_slots if self._waiting.more else 0

    def fill(self) -> Iterator[Finished]:
        """Admits chains to all free slots. Yields those that end at once."""
        while len(self.slots) < self._num_slots:
            slot = yield from self._take()
            if slot is None:
                return
            self.slots.append(slot)
            yield from self._start(len(self.slots) - 1)

    def end_draw(self, ended: EndedDraw) -> Iterator[Finished]:
        """Gives a chain the answer to its draw. Yields the chains that end."""
        slot = self.slots[ended.row]
        if ended.status != Status.FAILED:
            yield from self._advance(ended.row, self._operations.collect(slot, ended.drawn))
            return
        slot.chain.close()
        self._memory.clear(ended.row)
        self._waiting.read()
        generated = slot.base.length + len(ended.drawn.tokens)
        yield from self._end(ended.row, None, f"{NOT_NUMBERS} (after {generated} tokens)")

    def _take(self) -> Generator[Finished, None, Slot | None]:
        """Returns the next chain in a new slot, or None if no chain waits. Yields chains that end before any operation."""
        while True:
            entry = self._waiting.next()
            if entry is None:
                return None
            if entry.operation is not None:
                return Slot(entry.tag, entry.chain, entry.operation, self._meter.clock)
            yield Finished(entry.tag, entry.result, Cost(), 0.0, 0.0)

    def _start(self, row: int) -> Iterator[Finished]:
        """Begins the row's new chain."""
        self._memory.admit(self.slots[row], row)
        yield from self._advance(row, None)

    def _advance(self, row: int, answer: Trajectory | None) -> Iterator[Finished]:
        """Gives the row's chain its answer, and answers its operations until one needs decode steps.

        Args:
            answer: the answer; None if the chain has just started and its first operation is pending.
        """
        slot = self.slots[row]
        while True:
            if answer is not None:
                try:
                    slot.operation = slot.chain.send(answer)
                except StopIteration as stop:
                    yield from self._end(row, stop.value)
                    return
            try:
                answer = self._operations.answer(slot, row, slot.operation)
            except UnusableLogits:
                slot.chain.close()
                yield from self._end(row, None, NOT_NUMBERS)
                return
            if answer is None:
                return

    def _end(self, row: int, result: ChainResult | None, failure: str = "") -> Iterator[Finished]:
        """Puts the next chain into the row, or closes the gap."""
        slot = self.slots[row]
        done = Finished(slot.tag, result, slot.cost, time.perf_counter() - slot.started, self._meter.clock - slot.clock,
                        failure, tuple(slot.walk))
        taken = yield from self._take()
        if taken is None:
            self._close_gap(row)
            yield done
        else:
            self.slots[row] = taken
            yield done
            yield from self._start(row)

    def _close_gap(self, row: int) -> None:
        """Moves the last live row into the gap."""
        last = len(self.slots) - 1
        if row != last:
            self._memory.move(self.slots[last], last, row, self._loop.positions_held(last))
            self._loop.move(last, row)
            self.slots[row] = self.slots[last]
        self._loop.drop(last)
        self.slots.pop()

    def _count_prompts(self, tokens: int, forwards: int, started: float) -> None:
        self._meter.count_reading(tokens, forwards, started)
        self._meter.share(started, len(self.slots))
