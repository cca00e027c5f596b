"""The host's state of a live chain, and the sizes of the pieces in which prompts are read."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator

import numpy as np

from dflash_mcmc.engine.rows import RowCounts
from dflash_mcmc.ops import Chain, Operation
from dflash_mcmc.types import Cost, Trajectory, common_prefix

_SMALLEST_CHUNK = 8


class Slot:
    """A live chain: its generator, its current operation, and the tokens whose keys and values its rows hold.

    Attributes:
        base: the trajectory that the draw in progress extends.
        held: tokens whose keys and values the row holds, from position 0 on.
        saved: tokens of the current sequence; the spare row holds their positions from `saved_from` on.
        clock: the engine's clock at the chain's start.
        counts: counts of the latest draw that has ended.
        walk: a trace entry for each drafted block, if a trace is kept.
    """

    __slots__ = ("base", "chain", "clock", "cost", "counts", "held", "operation", "saved", "saved_from", "started", "tag",
                 "walk")

    def __init__(self, tag: Hashable, chain: Chain, operation: Operation, clock: float):
        self.tag, self.chain, self.operation, self.clock = tag, chain, operation, clock
        self.started, self.cost = time.perf_counter(), Cost()
        self.base: Trajectory = operation.trajectory
        self.held = self.saved = np.empty(0, np.int64)
        self.saved_from, self.counts = 0, RowCounts()
        self.walk: list[dict[str, object]] = []

    def charge(self, **amounts: int) -> None:
        """Adds to the chain's cost, by the names of `Cost`."""
        self.cost = self.cost._replace(**{name: getattr(self.cost, name) + amount for name, amount in amounts.items()})

    def restorable(self, sequence: np.ndarray, start: int) -> int:
        """The position up to which the spare row holds `sequence` from `start` on; `start` if it holds nothing of it."""
        if not self.saved_from <= start < len(self.saved):
            return start
        return max(start, common_prefix(self.saved, sequence))

    def save(self, current: np.ndarray, start: int) -> tuple[int, int]:
        """The span to copy to the spare row, which then holds `current` from position `start` on.

        `current` is the sequence that the chain returns to after a rejection; the draw overwrites the row from `start` on.
        """
        in_row = common_prefix(self.held, current)
        if self.saved_from <= in_row < common_prefix(self.saved, current):
            span = (start, self.saved_from)
            self.saved_from = min(start, self.saved_from)
        else:
            span = (start, in_row)
            self.saved, self.saved_from = current[:in_row], start
        return span


def chunks(start: int, stop: int, largest: int) -> Iterator[tuple[int, int]]:
    """(first position, size) of chunks that cover `start` to `stop - 1`. The last chunk may reach beyond.

    There are few sizes (8, 16, 24, 32, 48, 64, 96, ...), which lets chunks of several rows share a forward. Less than half of
    a chunk is padding.
    """
    while start < stop:
        needed, size = min(stop - start, largest), _SMALLEST_CHUNK
        while size < needed:
            size *= 2
        between = 3 * size // 4
        if between >= needed and between % _SMALLEST_CHUNK == 0:
            size = between
        yield start, size
        start += size


def reading_cost(start: int, stop: int, largest: int) -> dict[str, int]:
    """The cost of reading positions `start` to `stop - 1` in chunks, by the names of `Cost`."""
    return {"target_forwards": len(list(chunks(start, stop, largest))), "token_forwards": stop - start}


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step
