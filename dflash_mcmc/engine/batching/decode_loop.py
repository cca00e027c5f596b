"""Decode steps of all live rows, run until the next check for ended draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine.batching.cache import Ladder
from dflash_mcmc.engine.batching.chains import Slot, SlotMemory
from dflash_mcmc.engine.batching.rows import (
    DrawnTokens,
    Group,
    RowCounts,
    RowProgress,
    Rows,
    SharedForwards,
    Start,
    Status,
    Stepper,
)
from dflash_mcmc.engine.speculative.steps import Tracer
from dflash_mcmc.ops import Draw, Operation
from dflash_mcmc.process import bars


class EndedDraw(NamedTuple):
    """A row whose draw has ended."""

    row: int
    drawn: DrawnTokens
    counts: RowCounts
    status: Status


class Diverged(NamedTuple):
    """A row that has drawn another token than its leader, or whose leader has ended.

    Its keys and values up to `position` are those of its leader. `token` is the token at `position`, which comes next.
    """

    row: int
    position: int
    token: int


class Stop(NamedTuple):
    """What a check has found."""

    ended: list[EndedDraw]
    """In the order of their rows."""
    parted: list[Diverged]
    row_steps: int
    """Steps since the last check, summed over rows."""


class DecodeLoop:
    """Steps all live rows together.

    Args:
        rows: the state of the draws.
        stepper: makes the steps.
        memory: keys and values of the rows.
        ladder: shapes of the batch.
        steps_per_sync: steps between two checks for ended draws.
        tracer: records the outcome of drafted blocks; None for no trace.
    """

    def __init__(self, rows: Rows, stepper: Stepper, memory: SlotMemory, ladder: Ladder, steps_per_sync: int,
                 tracer: Tracer | None = None):
        self.rows, self.stepper, self.steps_per_sync = rows, stepper, steps_per_sync
        self._memory, self._ladder, self._tracer = memory, ladder, tracer
        self._starts: dict[int, Start] = {}
        self.groups: tuple[Group, ...] = ()
        self._num_fed = 0
        self._riders: SharedForwards | None = None
        # On the host, per row: an upper bound on its position, its number of steps at the last check, and the position at
        # which it is idle, or -1.
        self._top, self._rounds, self._idle = (np.zeros(rows.num_rows, np.int64) for _ in range(3))
        rows.idle(slice(None))

    def reset(self) -> None:
        """Forgets all draws."""
        self._starts, self.groups = {}, ()
        self._num_fed, self._riders = 0, None
        self.rows.idle(slice(None))
        for values in (self._top, self._rounds, self._idle):
            values[:] = 0

    def begin(self, start: Start, draw: Draw) -> None:
        """Adds a draw: its row takes part from the next step on."""
        self._starts[start.row] = start
        self._top[start.row], self._rounds[start.row], self._idle[start.row] = start.first - 1, 0, -1
        if len(self.groups) != 1 or self.groups[0] != _group(draw, None):
            self.groups = ()

    def cost(self, draw: Operation, tokens: int, counts: RowCounts) -> dict[str, int]:
        """The cost of a draw that has gained `tokens` tokens, by the names of `Cost`."""
        return self.stepper.cost(_group(draw, None), tokens, counts)

    def positions_held(self, row: int) -> int:
        """Positions of a row that may hold keys and values."""
        return int(self._top[row]) + 1

    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows, whose draws continue."""
        self.rows.swap(a, b)
        for values in (self._top, self._rounds, self._idle):
            values[[a, b]] = values[[b, a]]
        starts = {row: self._starts.pop(row) for row in (a, b) if row in self._starts}
        for row, start in starts.items():
            other = b if row == a else a
            self._starts[other] = start._replace(row=other)

    def drop(self, row: int, held: int) -> None:
        """Takes a row out of the batch. A step may still feed it, but overwrites none of its first `held` positions."""
        self._starts.pop(row, None)
        if self._idle[row] != held:
            self.rows.idle(row, held)
            self._idle[row] = self._top[row] = held

    def arrange(self, slots: Sequence[Slot], num_fed: int) -> None:
        """Notes the rows of the next steps.

        Args:
            slots: the live slots in the order of their rows: slots that are fed, then slots that share their forwards.
            num_fed: the number of slots that are fed.
        """
        self._num_fed, self._riders = num_fed, None
        if len(self.groups) != 1:
            self.groups = ()
        if num_fed < len(slots):
            leader = list(range(self._batch(len(slots))))
            for row in range(num_fed, len(leader)):
                rides = slots[row].leader if row < len(slots) else None
                leader[row] = 0 if rides is None else rides.place
            self._riders = SharedForwards(len(leader), torch.tensor(leader, device=self.rows.device))

    def run(self, slots: Sequence[Slot]) -> Stop:
        """Writes the state of the draws that begin, and steps the live slots until the next check."""
        if self._starts:
            self.rows.begin(list(self._starts.values()))
            self._starts = {}
        self.groups = self.groups or _grouped([slot.operation for slot in slots if slot.operation], self.rows.device)
        live, batch, before = len(slots), self._batch(self._num_fed), self._top[: len(slots)].copy()
        self.rows.has_floors = any(isinstance(slot.operation, Draw) and slot.operation.floor is not None for slot in slots)
        for _ in range(self.steps_per_sync):
            keys = self._memory.reserve_step(self._top[:batch], self.stepper.reach)
            self.stepper.step(self._memory.cache, self.rows, batch, keys, self.groups, self._riders)
            self._top[:live] += self.stepper.tokens_a_step
            if self._tracer:
                self._tracer.keep(slots)
        progress = self.rows.progress(live)
        bars.drew(int((progress.position - before).sum()))
        self._memory.cache.passed(before[: self._num_fed], progress.position[: self._num_fed])
        row_steps = int((progress.rounds - self._rounds[:live]).sum())
        self._top[:live], self._rounds[:live] = progress.position, progress.rounds
        return Stop(self._ended(slots, progress), self._parted(progress), row_steps)

    def _batch(self, rows: int) -> int:
        return min(self._ladder.batch(rows), self.rows.num_rows)

    def _parted(self, progress: RowProgress) -> list[Diverged]:
        rows = np.flatnonzero(progress.status == Status.DIVERGED).tolist()
        if not rows:
            return []
        tokens = self.rows.tokens[rows, torch.from_numpy(progress.position[rows]).to(self.rows.device)].tolist()
        return [Diverged(row, int(progress.position[row]), token) for row, token in zip(rows, tokens, strict=True)]

    def _ended(self, slots: Sequence[Slot], progress: RowProgress) -> list[EndedDraw]:
        ended = np.flatnonzero((progress.status != Status.LIVE) & (progress.status != Status.DIVERGED)).tolist()
        if not ended:
            return []
        spans = [(row, slots[row].in_progress.sequence_length, int(progress.position[row]) + 1) for row in ended]
        return [EndedDraw(row, drawn, progress.counts(row), Status(progress.status[row]))
                for row, drawn in zip(ended, self.rows.read(spans), strict=True)]


def _group(operation: Operation, rows: torch.Tensor | None) -> Group:
    return Group(operation.params, operation.source, rows, operation.laws, operation.entropy, operation.kept)


def _grouped(operations: Sequence[Operation], device: torch.device) -> tuple[Group, ...]:
    """Groups the live rows by what they draw and measure. A single group does not list its rows."""
    rows: dict[Group, list[int]] = {}
    for row, operation in enumerate(operations):
        rows.setdefault(_group(operation, None), []).append(row)
    if len(rows) == 1:
        return (next(iter(rows)),)
    return tuple(group._replace(rows=torch.tensor(mine, device=device))
                 for group, mine in sorted(rows.items(), key=lambda item: repr(item[0])))
