"""The host's state of a slot, and the sizes of the pieces in which prompts are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dflash_mcmc.engine.batching.contents import Contents
from dflash_mcmc.engine.batching.rows import RowCounts
from dflash_mcmc.ops import Operation
from dflash_mcmc.types import Trajectory

if TYPE_CHECKING:
    from dflash_mcmc.draft.adaptation.learning import Adapter
    from dflash_mcmc.engine.batching.live_chain import LiveChain
    from dflash_mcmc.engine.batching.stash import Stash

_SMALLEST_CHUNK = 8


class Slot:
    """Keys and values of a chain, and the operation that uses them.

    A slot that works has a row of the batch. A slot that rests or waits may have a row, a stash or neither.

    Attributes:
        chain: the chain that the slot belongs to.
        row: the number of its row; None without one.
        stash: its keys and values while it has no row; None if it has a row or holds nothing.
        contents: the tokens whose keys and values it holds.
        number: the number of its operation in the chain's request.
        operation: the operation that it works or waits for; None if there is none.
        base: the trajectory that the operation extends.
        leader: the slot that makes this draw's forwards, since both have had the same tokens; None if the draw makes its own.
        clock: the engine's clock at the start of the operation.
        reading_clock: the part of it in which the engine has read prompts and prefixes.
        counts: counts of the latest draw that has ended.
        walk: a trace entry for each block drafted for the operation, if a trace is kept.
        adapter: what the draft has learned in the slot's operations; None for nothing.
    """

    __slots__ = ("adapter", "base", "chain", "clock", "contents", "counts", "leader", "number", "operation", "reading_clock",
                 "row", "stash", "walk")

    def __init__(self, chain: LiveChain):
        self.chain, self.contents, self.counts = chain, Contents(), RowCounts()
        self.row: int | None = None
        self.stash: Stash | None = None
        self.operation: Operation | None = None
        self.base: Trajectory | None = None
        self.adapter: Adapter | None = None
        self.leader: Slot | None = None
        self.number, self.clock, self.reading_clock = 0, 0.0, 0.0
        self.walk: list[dict[str, object]] = []

    @property
    def place(self) -> int:
        """The number of its row. Raises ValueError without one."""
        if self.row is None:
            raise ValueError("this slot has no row")
        return self.row

    @property
    def in_progress(self) -> Trajectory:
        """The trajectory that the operation extends. Raises ValueError without an operation."""
        if self.base is None:
            raise ValueError("this slot has no operation")
        return self.base

    def work_for(self, number: int, base: Trajectory) -> None:
        """Takes operation `number` of the chain's request, which extends `base`."""
        self.number, self.base, self.leader, self.walk = number, base, None, []
        self.operation = self.chain.operations[number]

    def rest(self) -> None:
        """Ends the operation. The keys and values stay."""
        self.operation = self.leader = self.base = None


def rests(slot: Slot | None) -> bool:
    """Whether the row of this slot, or of none, is free for an operation."""
    return slot is None or slot.operation is None


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


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step
