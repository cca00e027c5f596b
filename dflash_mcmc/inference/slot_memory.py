"""Keys and values of the live chains. Rows are changed from one sequence to the next with as little reading as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_mcmc.inference.cache import SlotCache
from dflash_mcmc.inference.interface import Options
from dflash_mcmc.inference.ladder import Ladder
from dflash_mcmc.inference.model_runner import ModelRunner, Span
from dflash_mcmc.inference.prompts import PromptReader
from dflash_mcmc.inference.slots import Slot
from dflash_mcmc.inference.stash import Home, Stash
from dflash_mcmc.types import Trajectory


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
        self.reset()

    def reset(self) -> None:
        """Forgets the pending reads of an earlier run."""
        self._unread: list[Slot] = []

    def reserve(self, length: int) -> None:
        """Makes the rows long enough for a sequence of `length` tokens and its padding."""
        self.cache.reserve(self._key_length(length + self._padding))

    def reserve_step(self, reach: int) -> int:
        """Makes the rows long enough for a step that touches `reach` positions. Returns the length of its keys."""
        keys = self._key_length(reach)
        self.cache.reserve(keys)
        return keys

    def admit(self, slot: Slot, prompt: np.ndarray) -> None:
        """Copies a prompt that has been read ahead into a slot's row.

        Each chain is charged for its prompt, even if it shares the prompt, because its cost must not depend on other chains.
        """
        if self.prompts is None:
            return
        self.reserve(len(prompt))
        length = self.prompts.copy(prompt, self.cache, slot.place)
        slot.contents.hold(prompt[:length])
        slot.chain.charge_reading(0, 0, length, self._options.prefill_chunk)

    def place(self, slot: Slot, sequence: np.ndarray, along: Trajectory | None, like: Slot | None = None) -> int:
        """Copies the tokens of a sequence that the chain holds into a slot. The other tokens, except the last, are read later.

        Args:
            along: the current sequence, which the spare row then keeps.
            like: a slot of the chain that has been placed for the same sequence.

        Returns:
            The position of the first missing token. `fill` requests the missing tokens.
        """
        others = [other for other in slot.chain.slots if other is not slot]
        done = slot.contents.place(sequence, along, [other.contents for other in others], self._options,
                                   None if like is None else others.index(like))
        if not done.forked and done.saved[0] >= done.saved[1]:
            return 0
        home = self._home(slot, len(sequence) if along is None else max(len(sequence), along.sequence_length))
        if home.spare is not None and done.kept < done.restored:
            home.cache.copy(home.spare, home.row, home.row, done.kept, done.restored)
        if done.source is not None:
            source = self._home(others[done.source])
            home.cache.copy(source.cache, source.row, home.row, done.restored, done.forked)
        if home.spare is not None and done.saved[0] < done.saved[1]:
            home.spare.reserve(home.cache.length)  # spare rows grow only when one is written: plain draws never need them
            home.spare.copy(home.cache, home.row, home.row, *done.saved)
        return done.forked

    def fill(self, slot: Slot) -> None:
        """Requests the missing tokens of a slot from the next `read`."""
        contents = slot.contents
        if contents.filled < len(contents.held):
            self._unread.append(slot)

    def follow(self, leader: Slot, slot: Slot, length: int) -> None:
        """Copies the positions up to `length` that a slot lacks from its leader's row."""
        start = slot.contents.filled
        if start < length:
            self.cache.copy(self.cache, leader.place, slot.place, start, length)

    def stash(self, slot: Slot) -> None:
        """Copies a slot's keys and values out of its row."""
        held = slot.contents
        if not held.filled and held.saved_from >= len(held.saved):
            return
        row, slot.stash = slot.place, self._new_stash(max(held.filled, len(held.saved)))
        slot.stash.cache.copy(self.cache, row, 0, 0, held.filled)
        if self.spare is not None and slot.stash.spare is not None and held.saved_from < len(held.saved):
            slot.stash.spare.copy(self.spare, row, 0, held.saved_from, len(held.saved))

    def unstash(self, slot: Slot) -> None:
        """Copies a slot's keys and values into its row."""
        held, stash, slot.stash = slot.contents, slot.stash, None
        if stash is None:
            return
        self.reserve(max(len(held.held), len(held.saved)))
        self.cache.copy(stash.cache, 0, slot.place, 0, held.filled)
        if self.spare is not None and stash.spare is not None and held.saved_from < len(held.saved):
            self.spare.reserve(self.cache.length)
            self.spare.copy(stash.spare, 0, slot.place, held.saved_from, len(held.saved))

    def read(self) -> tuple[int, int]:
        """Reads the missing tokens of all rows. Returns the number of tokens and of forwards."""
        slots, self._unread = self._unread, []
        spans = [Span(slot.row, slot.in_progress.sequence, slot.contents.filled, len(slot.contents.held))
                 for slot in slots if slot.row is not None and slot.operation is not None]
        for slot in slots:
            slot.contents.read()
        return sum(span.stop - span.start for span in spans), self.runner.read(self.cache, spans) if spans else 0

    def swap(self, a: int, b: int, slots: Sequence[Slot | None], lengths: Sequence[int]) -> None:
        """Exchanges two rows.

        Args:
            slots: the slots of these rows.
            lengths: positions of each that hold keys and values.
        """
        self.cache.swap(a, b, *lengths)
        saved = [0 if slot is None else len(slot.contents.saved) for slot in slots]
        if self.spare is not None and any(saved):
            self.spare.reserve(self.cache.length)
            self.spare.swap(a, b, *saved)
        if self.runner.grid:
            self.runner.grid.swap(a, b)

    def clear(self, row: int) -> None:
        """Removes numbers that are not finite from a row and from the prompts that are read ahead."""
        for cache in (self.cache, self.spare):
            if cache is not None:
                cache.clear(row)
        if self.prompts is not None:
            self.prompts.clear()

    def _key_length(self, length: int) -> int:
        return min(self._ladder.keys(length), self._longest)

    def _home(self, slot: Slot, length: int = 0) -> Home:
        """Where a slot's keys and values are. A slot with neither row nor stash gets a stash for `length` positions."""
        if slot.row is not None:
            return Home(self.cache, self.spare, slot.row)
        if slot.stash is None:
            slot.stash = self._new_stash(length)
        slot.stash.cache.reserve(length)
        return Home(*slot.stash, 0)

    def _new_stash(self, length: int) -> Stash:
        return Stash(self.cache.of_one_row(length), None if self.spare is None else self.spare.of_one_row(length))
