"""Measures the work of an engine and the share of its time for each chain."""

from __future__ import annotations

import time

from dflash_mcmc.inference.interface import Counters


class Meter:
    """The counters and the clock of an engine.

    Attributes:
        clock: seconds per chain since the start of the run. The time of each step is divided among the chains in it.
    """

    def __init__(self) -> None:
        self.counters, self.clock = Counters(), 0.0

    def reset_clock(self) -> None:
        """Resets the clock at the start of a run. The counters are kept."""
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
            busy_slots: number of slots of the engine if chains wait, else 0.
        """
        counters = self.counters
        self.counters = counters._replace(
            steps=counters.steps + steps, row_steps=counters.row_steps + row_steps,
            busy_row_steps=counters.busy_row_steps + (row_steps if busy_slots else 0),
            busy_slot_steps=counters.busy_slot_steps + steps * busy_slots,
            step_seconds=counters.step_seconds + time.perf_counter() - started)
