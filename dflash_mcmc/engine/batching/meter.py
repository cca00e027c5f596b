"""Measures the work of an engine and the share of its time for each chain."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dflash_mcmc.engine.batching.interface import Counters

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.slots import Slot


class Meter:
    """The counters and the clock of an engine.

    Attributes:
        clock: seconds per chain since the start of the run. The time of each step is divided among the chains in it.
        reading_clock: the part of `clock` in which prompts and prefixes were read.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self.reset_clock()

    def reset_clock(self) -> None:
        """Resets the clocks at the start of a run. The counters are kept."""
        self.clock = self.reading_clock = self._reading = 0.0

    def share(self, started: float, chains: int) -> None:
        """Divides the time since `started` among chains."""
        self.clock += (time.perf_counter() - started) / max(1, chains)
        self.reading_clock += self._reading / max(1, chains)
        self._reading = 0.0

    def begin(self, slot: Slot) -> None:
        """Notes the clocks at the start of a slot's operation."""
        slot.clock, slot.reading_clock = self.clock, self.reading_clock

    def charge(self, slot: Slot) -> None:
        """Adds the time since the start of a slot's operation to its chain."""
        chain = slot.chain
        chain.seconds += self.clock - slot.clock
        chain.prefill_seconds = (chain.prefill_seconds or 0.0) + self.reading_clock - slot.reading_clock

    def count_reading(self, tokens: int, forwards: int, started: float, ahead: bool = False) -> None:
        """Counts tokens that were read since `started`.

        Args:
            ahead: whether they were read for chains that have not begun, and take no part in the next step.
        """
        counters, seconds = self.counters, time.perf_counter() - started
        self._reading += 0.0 if ahead else seconds
        self.counters = counters._replace(
            read_tokens=counters.read_tokens + tokens, read_forwards=counters.read_forwards + forwards,
            read_seconds=counters.read_seconds + seconds)

    def count_steps(self, steps: int, row_steps: int, busy_slots: int, started: float) -> None:
        """Counts decode steps since `started`.

        Args:
            row_steps: rows that drew a token, summed over steps.
            busy_slots: number of slots of the engine if chains wait, else 0.
        """
        counters = self.counters
        self.counters = counters._replace(
            steps=counters.steps + steps, row_steps=counters.row_steps + row_steps,
            busy_row_steps=counters.busy_row_steps + (row_steps if busy_slots else 0),
            busy_slot_steps=counters.busy_slot_steps + steps * busy_slots,
            step_seconds=counters.step_seconds + time.perf_counter() - started)
