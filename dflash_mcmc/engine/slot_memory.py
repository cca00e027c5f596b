"""Keys and values of the live chains. Rows are changed from one sequence to the next with as little reading as possible."""

from __future__ import annotations

import numpy as np

from dflash_mcmc.engine.cache import SlotCache
from dflash_mcmc.engine.interface import Options
from dflash_mcmc.engine.ladder import Ladder
from dflash_mcmc.engine.model_runner import ModelRunner, Span
from dflash_mcmc.engine.prompts import PromptReader
from dflash_mcmc.engine.slots import Slot, reading_cost
from dflash_mcmc.types import Trajectory, common_prefix


class SlotMemory:
    """A row of keys and values for each slot, and a spare row that keeps the current sequence while a draw overwrites it.

    Args:
        runner: reads the missing tokens of a row.
        cache, spare: the caches of all slots; `spare` is None if no current sequence is kept.
        prompts: the reader of prompts ahead of their chains; None if each slot reads its own prompt.
        options: the engine's options.
        ladder: shapes of the keys.
        padding: number of positions for padding after a sequence.
        longest: maximal number of positions of a row.
    """

    def __init__(self, runner: ModelRunner, cache: SlotCache, spare: SlotCache | None, prompts: PromptReader | None,
                 options: Options, ladder: Ladder, padding: int, longest: int):
        self.runner, self.cache, self.spare, self.prompts = runner, cache, spare, prompts
        self._options, self._ladder, self._padding, self._longest = options, ladder, padding, longest
        self._unread: list[Span] = []

    def reset(self) -> None:
        """Forgets the pending reads of an earlier run."""
        self._unread = []

    def reserve(self, length: int) -> None:
        """Makes the rows long enough for a sequence of `length` tokens and its padding."""
        self.cache.reserve(self._key_length(length + self._padding))

    def reserve_step(self, reach: int) -> int:
        """Makes the rows long enough for a step that touches `reach` positions. Returns the length of its keys."""
        keys = self._key_length(reach)
        self.cache.reserve(keys)
        return keys

    def admit(self, slot: Slot, row: int) -> None:
        """Copies the prompt of a new chain into its row, if the prompt has been read ahead.

        Each chain is charged for the reading of its prompt, shared or not, because its cost must not depend on other chains.
        """
        if self.prompts is None:
            return
        prompt = slot.operation.trajectory.prompt
        self.reserve(len(prompt))
        length = self.prompts.copy(prompt, self.cache, row)
        slot.held = prompt[:length]
        slot.charge(**reading_cost(0, length, self._options.prefill_chunk))

    def place(self, slot: Slot, row: int, sequence: np.ndarray, along: Trajectory | None) -> None:
        """Prepares the row to hold a sequence without its last token. The next `read` reads the missing tokens."""
        end = len(sequence) - 1
        held = min(common_prefix(slot.held, sequence), end) if self._options.reuse_prefix else 0
        start = held if self.spare is None else self._restore(self.spare, slot, row, sequence, held, along)
        if start < end:
            self._unread.append(Span(row, sequence, start, end))
            slot.charge(**reading_cost(start, end, self._options.prefill_chunk))
        slot.held = sequence[:-1]

    def _restore(self, spare: SlotCache, slot: Slot, row: int, sequence: np.ndarray, held: int,
                 along: Trajectory | None) -> int:
        """Copies the part of `sequence` that the spare row holds, and saves the current sequence to the spare row.

        Returns the number of tokens of `sequence` that the row then holds.
        """
        end = len(sequence) - 1
        start = min(slot.restorable(sequence, held), end)
        self._copy(self.cache, spare, row, held, start)
        slot.held = np.concatenate([slot.held[:held], sequence[held:start]]) if start > held else slot.held
        if along is not None:
            self._copy(spare, self.cache, row, *slot.save(np.concatenate([along.prompt, along.tokens])[:-1], end))
        return start

    def read(self) -> tuple[int, int]:
        """Reads the missing tokens of all rows. Returns the number of tokens and of forwards."""
        spans, self._unread = self._unread, []
        return sum(span.stop - span.start for span in spans), self.runner.read(self.cache, spans) if spans else 0

    def move(self, slot: Slot, source: int, destination: int, length: int) -> None:
        """Moves a chain of `length` tokens to another row, where it continues."""
        self.cache.copy(self.cache, source, destination, 0, length)
        if self.spare is not None:
            self.spare.copy(self.spare, source, destination, slot.saved_from, len(slot.saved))
        if self.runner.grid:
            self.runner.grid.move(source, destination)
        self._unread = [span._replace(row=destination) if span.row == source else span for span in self._unread]

    def clear(self, row: int) -> None:
        """Removes numbers that are not finite from a row and from the prompts that are read ahead."""
        for cache in (self.cache, self.spare):
            if cache is not None:
                cache.clear(row)
        if self.prompts is not None:
            self.prompts.clear()

    def _key_length(self, length: int) -> int:
        return min(self._ladder.keys(length), self._longest)

    def _copy(self, cache: SlotCache, source: SlotCache, row: int, start: int, stop: int) -> None:
        if start < stop:
            cache.reserve(self.cache.length)  # spare rows grow only when one is written: plain draws never need them
            cache.copy(source, row, row, start, stop)
