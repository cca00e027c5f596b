"""What an engine has done, and how much of its time each chain has had."""

from __future__ import annotations

import time

from dflash_mcmc.engine.interface import Counters


class Meter:
    """Counters of an engine, and its clock.

    Attributes:
        clock: seconds that a chain has had since the start of the run: the time of each step is divided among its chains.
    """

    def __init__(self) -> None:
        self.counters, self.clock = Counters(), 0.0

    def reset_clock(self) -> None:
        """Begins a run; the counters go on."""
        self.clock = 0.0

    def share(self, started: float, chains: int) -> None:
        """Divides the time since `started` among chains."""
        self.clock += (time.perf_counter() - started) / max(1, chains)

    def count_reading(self, tokens: int, forwards: int, started: float) -> None:
        """Counts tokens that were read since `started`."""
        counters = self.counters
        self.counters = counters._replace(
            read_tokens=counters.read_tokens + tokens, read_forwards=counters.read_forwards + forwards,
            read_seconds=counters.read_seconds + time.perf_counter() - started)

    def count_steps(self, steps: int, row_steps: int, busy_slots: int, started: float) -> None:
        """Counts decode steps since `started`.

        Args:
            row_steps: rows that drew a token, summed over steps.
            busy_slots: slots of the engine where chains wait; 0 where none waits.
        """
        counters = self.counters
        self.counters = counters._replace(
            steps=counters.steps + steps, row_steps=counters.row_steps + row_steps,
            busy_row_steps=counters.busy_row_steps + (row_steps if busy_slots else 0),
            busy_slot_steps=counters.busy_slot_steps + steps * busy_slots,
            step_seconds=counters.step_seconds + time.perf_counter() - started)
