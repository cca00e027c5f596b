"""Runs decode steps of the live rows until the next check for ended draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine.ladder import Ladder
from dflash_mcmc.engine.rows import DrawnTokens, RowProgress, Rows, Start, Status
from dflash_mcmc.engine.slot_memory import SlotMemory
from dflash_mcmc.engine.slots import Slot
from dflash_mcmc.engine.speculative.trace import Tracer
from dflash_mcmc.engine.stepper import Group, Stepper
from dflash_mcmc.ops import Draw, Operation, SamplingParams


class EndedDraw(NamedTuple):
    """A row whose draw has ended."""

    row: int
    drawn: DrawnTokens
    status: Status


class DecodeLoop:
    """Steps all live rows together.

    Args:
        rows: the state of the draws.
        stepper: makes the steps.
        memory: keys and values of the rows.
        ladder: shapes of the batch.
        steps_a_look: steps between two checks for ended draws.
        tracer: records the outcome of drafted blocks; None for no trace.
    """

    def __init__(self, rows: Rows, stepper: Stepper, memory: SlotMemory, ladder: Ladder, steps_a_look: int,
                 tracer: Tracer | None = None):
        self.rows, self.stepper, self.steps_a_look = rows, stepper, steps_a_look
        self._memory, self._ladder, self._tracer = memory, ladder, tracer
        self.reset()

    def reset(self) -> None:
        """Forgets all draws."""
        self._starts: dict[int, Start] = {}
        self.groups: tuple[Group, ...] = ()
        self.rows.idle(slice(None))
        # On the host, per row: an upper bound on its position, and its number of steps at the last check.
        self._top, self._rounds = (np.zeros(self.rows.num_rows, np.int64) for _ in range(2))

    def begin(self, start: Start, draw: Draw) -> None:
        """Adds a draw: its row takes part from the next step on."""
        self._starts[start.row] = start
        self._top[start.row], self._rounds[start.row] = start.first - 1, 0
        if len(self.groups) != 1 or self.groups[0][:2] != (draw.params, draw.source):
            self.groups = ()

    def positions_held(self, row: int) -> int:
        """Positions of a row that may hold keys and values."""
        return int(self._top[row]) + 1

    def move(self, source: int, destination: int) -> None:
        """Moves a draw to another row, where it continues."""
        self.rows.move(source, destination)
        self._top[destination], self._rounds[destination] = self._top[source], self._rounds[source]
        if source in self._starts:
            self._starts[destination] = self._starts.pop(source)._replace(row=destination)

    def drop(self, row: int) -> None:
        """Takes a row out of the batch."""
        self.rows.idle(row)
        if len(self.groups) > 1:
            self.groups = ()

    def prepare(self) -> None:
        """Writes the state of the draws that begin."""
        if self._starts:
            self.rows.begin(list(self._starts.values()))
            self._starts = {}

    def run(self, slots: Sequence[Slot]) -> tuple[list[EndedDraw], int]:
        """Steps until the next check. Returns the ended draws in the order of their rows, and the steps summed over rows."""
        self.groups = self.groups or _grouped([slot.operation for slot in slots], self.rows.device)
        self._step(slots)
        live = len(slots)
        progress = self.rows.progress(live)
        row_steps = int((progress.rounds - self._rounds[:live]).sum())
        self._top[:live], self._rounds[:live] = progress.position, progress.rounds
        return self._ended(slots, progress), row_steps

    def _step(self, slots: Sequence[Slot]) -> None:
        live = len(slots)
        batch = min(self._ladder.batch(live), self.rows.num_rows)
        floors = any(isinstance(slot.operation, Draw) and slot.operation.floor is not None for slot in slots)
        for _ in range(self.steps_a_look):
            keys = self._memory.reserve_step(int(self._top[:live].max()) + self.stepper.reach)
            self.stepper.step(self._memory.cache, self.rows, batch, keys, self.groups, floors)
            self._top[:live] += self.stepper.tokens_a_step
            if self._tracer:
                self._tracer.keep(slots)

    def _ended(self, slots: Sequence[Slot], progress: RowProgress) -> list[EndedDraw]:
        ended = np.flatnonzero(progress.status != Status.LIVE).tolist()
        if not ended:
            return []
        for row in ended:
            slots[row].counts = progress.counts(row)
        spans = [(row, slots[row].base.sequence_length, int(progress.position[row]) + 1) for row in ended]
        return [EndedDraw(row, drawn, Status(progress.status[row]))
                for row, drawn in zip(ended, self.rows.read(spans), strict=True)]


def _grouped(operations: Sequence[Operation], device: torch.device) -> tuple[Group, ...]:
    """Groups the live rows by sampling parameters and source. A single group does not list its rows."""
    rows: dict[tuple[SamplingParams, str], list[int]] = {}
    for row, operation in enumerate(operations):
        rows.setdefault((operation.params, operation.source), []).append(row)
    if len(rows) == 1:
        return (Group(*next(iter(rows)), None),)
    return tuple(Group(*setting, torch.tensor(mine, device=device)) for setting, mine in sorted(rows.items()))
