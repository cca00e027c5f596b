"""Keys and values of the live chains. Rows are changed from one sequence to the next with as little reading as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.engine.batching.cache import KVCache, Ladder
from dflash_mcmc.engine.batching.chains import CachedPrefix, Slot
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.model_runner import ModelRunner, Span
from dflash_mcmc.types import Trajectory


class SlotPlace(NamedTuple):
    """Where a slot's keys and values are: a row of a cache, and the same row of the cache of spare rows."""

    cache: KVCache
    spare: KVCache
    row: int = 0


class PromptReader:
    """Keys and values of a few prompts.

    Args:
        runner: reads the prompts.
        cache: a cache with a row for each prompt.
    """

    def __init__(self, runner: ModelRunner, cache: KVCache):
        self._runner, self._cache = runner, cache
        self._rows: dict[bytes, int] = {}
        self._free = list(range(cache.num_rows))

    @property
    def num_rows(self) -> int:
        """The number of prompts that fit."""
        return self._cache.num_rows

    def read(self, prompts: Sequence[np.ndarray]) -> tuple[int, int]:
        """Reads the missing prompts, and drops all others. Returns the number of tokens and forwards."""
        wanted = {prompt.tobytes(): prompt for prompt in prompts}
        for name in [name for name in self._rows if name not in wanted]:
            self._free.append(self._rows.pop(name))
        spans = []
        for name, prompt in wanted.items():
            if name not in self._rows:
                self._rows[name] = self._free.pop()
                self._cache.clear(self._rows[name])  # an earlier prompt may have left numbers that are not finite
                spans.append(Span(self._rows[name], prompt, 0, len(prompt) - 1, prompt))
        return sum(span.stop for span in spans), self._runner.read(self._cache, spans)

    def copy(self, prompt: np.ndarray, cache: KVCache, row: int) -> int:
        """Copies a prompt without its last token into a row of another cache. Returns their number, 0 if unread."""
        if (source := self._rows.get(prompt.tobytes())) is None:
            return 0
        cache.copy(self._cache, source, row, 0, len(prompt) - 1)
        return len(prompt) - 1

    def clear(self) -> None:
        """Forgets all prompts, which may hold NaN."""
        self._rows.clear()
        self._free = list(range(self.num_rows))
        self._cache.clear()


class SlotMemory:
    """A row of keys and values for each slot, and a spare row that keeps the current sequence while a draw overwrites it.

    Args:
        runner: reads the missing tokens of a row.
        cache, spare: the caches of all slots.
        prompts: the reader of prompts ahead of their chains.
        options: the engine's options.
        ladder: shapes of the keys.
        padding: number of positions for padding after a sequence.
        longest: maximal number of positions of a row.
    """

    def __init__(self, runner: ModelRunner, cache: KVCache, spare: KVCache, prompts: PromptReader,
                 options: Options, ladder: Ladder, padding: int, longest: int):
        self.runner, self.cache, self.spare, self.prompts = runner, cache, spare, prompts
        self._options, self._ladder, self._padding, self._longest = options, ladder, padding, longest
        self._unread: list[Slot] = []
        self.reset()

    def reset(self) -> None:
        """Forgets the pending reads of an earlier run, and what its draft has learned."""
        self._unread = []
        if self.runner.adaptive:
            self.runner.adaptive.reset()

    def reserve(self, length: int) -> None:
        """Makes the rows long enough for a sequence of `length` tokens and its padding."""
        self.cache.reserve(self._key_length(length + self._padding))

    def reserve_step(self, tops: np.ndarray, reach: int) -> int:
        """Makes the rows long enough for a step. Returns the length of its keys.

        Args:
            tops: int64 (rows,), bounds on the positions of the first rows.
            reach: number of positions, from a row's position on, that the step may touch.
        """
        keys = self._key_length(int(tops.max()) + reach)
        self.cache.reserve(keys)
        return keys

    def admit(self, slot: Slot, prompt: np.ndarray) -> None:
        """Copies a prompt that has been read ahead into a slot's row.

        Each chain is charged for its prompt, even if it shares the prompt, because its cost must not depend on other chains.
        `prompt_forwards` says how much of its cost that is (`Cost.together`).
        """
        self.reserve(len(prompt))
        length = self.prompts.copy(prompt, self.cache, slot.place)
        slot.contents.hold(prompt[:length])
        slot.chain.charge_reading(0, 0, length, self._options.prefill_chunk)
        slot.chain.charge(0, prompt_forwards=length)

    def place(self, slot: Slot, sequence: np.ndarray, along: Trajectory | None, like: Slot | None = None) -> int:
        """Copies the tokens of a sequence that the chain holds into a slot. The other tokens, except the last, are read later.

        Args:
            along: the current sequence, which the spare row then keeps.
            like: a slot of the chain that has been placed for the same sequence.

        Returns:
            The position of the first missing token. `fill` requests the missing tokens.
        """
        others = [other for other in slot.chain.slots if other is not slot]
        done = slot.contents.place(sequence, along, [other.contents for other in others],
                                   None if like is None else others.index(like))
        home = self._place_of(slot, len(sequence) if along is None else max(len(sequence), along.sequence_length))
        if done.kept < done.restored:
            home.cache.copy(home.spare, home.row, home.row, done.kept, done.restored)
        if done.source is not None:
            source = self._place_of(others[done.source])
            home.cache.copy(source.cache, source.row, home.row, done.restored, done.forked)
        if done.saved[0] < done.saved[1]:
            home.spare.reserve(home.cache.length)  # spare rows grow only when one is written: plain draws never need them
            home.spare.copy(home.cache, home.row, home.row, *done.saved)
        return done.forked

    def fill(self, slot: Slot) -> None:
        """Requests the missing tokens of a slot from the next `read`."""
        contents = slot.contents
        if contents.filled < len(contents.held) or self.cache.recurrent:
            self._unread.append(slot)

    def follow(self, leader: Slot, slot: Slot, length: int) -> None:
        """Copies the positions up to `length` that a slot lacks from its leader's row."""
        start = slot.contents.filled
        if start < length:
            self.cache.fork(leader.place, slot.place, start, length)

    def move_out(self, slot: Slot) -> None:
        """Moves a slot's keys and values out of its row, to the host's memory."""
        held = slot.contents
        if held.filled or held.saved_from < len(held.saved):
            slot.offloaded = self._new_offloaded(max(held.filled, len(held.saved)))
            _move(held, self._place_of(slot), slot.offloaded)

    def move_in(self, slot: Slot) -> None:
        """Copies a slot's keys and values into its row."""
        held, offloaded, slot.offloaded = slot.contents, slot.offloaded, None
        if offloaded is None:
            return
        self.reserve(max(len(held.held), len(held.saved)))
        _move(held, offloaded, SlotPlace(self.cache, self.spare, slot.place))

    def read(self) -> tuple[int, int]:
        """Reads the missing tokens of all rows. Returns the number of tokens and of forwards."""
        slots, self._unread = self._unread, []
        working = [slot for slot in slots if slot.row is not None and slot.operation is not None]
        self.runner.replay(self.cache, [slot.place for slot in working], [slot.contents.filled for slot in working])
        missing = [slot for slot in working if slot.contents.filled < len(slot.contents.held)]
        spans = [Span(slot.place, slot.in_progress.sequence, slot.contents.filled, len(slot.contents.held),
                      slot.in_progress.prompt) for slot in missing]
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
        if any(saved):
            self.spare.reserve(self.cache.length)
            self.spare.swap(a, b, *saved)
        for part in (self.runner.grid, self.runner.adaptive, self.runner.second):
            if part:
                part.swap(a, b)

    def clear(self, slot: Slot) -> None:
        """Removes numbers that are not finite from a slot and from the prompts that are read ahead."""
        home = self._place_of(slot)
        home.cache.clear(home.row)
        home.spare.clear(home.row)
        self.prompts.clear()

    def _key_length(self, length: int) -> int:
        return min(self._ladder.keys(length), self._longest)

    def _place_of(self, slot: Slot, length: int = 0) -> SlotPlace:
        """Where a slot's keys and values are. One with neither row nor memory gets memory for `length` positions."""
        if slot.row is not None:
            return SlotPlace(self.cache, self.spare, slot.row)
        if slot.offloaded is None:
            slot.offloaded = self._new_offloaded(length)
        slot.offloaded.cache.reserve(length)
        return slot.offloaded

    def _new_offloaded(self, length: int) -> SlotPlace:
        return SlotPlace(self.cache.on_host(length), self.spare.on_host(length))


def _move(held: CachedPrefix, home: SlotPlace, goal: SlotPlace) -> None:
    """Copies what a slot holds from one place to another."""
    goal.cache.copy(home.cache, home.row, goal.row, 0, held.filled)
    if held.saved_from < len(held.saved):
        goal.spare.reserve(goal.cache.length)
        goal.spare.copy(home.spare, home.row, goal.row, held.saved_from, len(held.saved))
