"""Keys and values of the live chains. Rows are changed from one sequence to the next with as little reading as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.engine.batching.cache import UNLIMITED, SlotCache
from dflash_mcmc.engine.batching.chains import CachedPrefix, Slot
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.ladder import Ladder
from dflash_mcmc.engine.batching.model_runner import ModelRunner, Span
from dflash_mcmc.engine.batching.paged_cache import PAGE_SIZE
from dflash_mcmc.types import Trajectory


class SlotPlace(NamedTuple):
    """Where a slot's keys and values are: a row of a cache, and the same row of the cache of spare rows."""

    cache: SlotCache
    spare: SlotCache | None
    row: int = 0


class PromptReader:
    """Keys and values of a few prompts.

    Args:
        runner: reads the prompts.
        cache: a cache with a row for each prompt.
    """

    def __init__(self, runner: ModelRunner, cache: SlotCache):
        self._runner, self._cache = runner, cache
        self._rows: dict[bytes, int] = {}
        self._free = list(range(cache.num_rows))

    @property
    def num_rows(self) -> int:
        """The number of prompts that fit."""
        return self._cache.num_rows

    def read(self, prompts: Sequence[np.ndarray]) -> tuple[int, int]:
        """Reads the missing prompts that find pages, and drops all others. Returns the number of tokens and forwards."""
        wanted = {prompt.tobytes(): prompt for prompt in prompts}
        for name in [name for name in self._rows if name not in wanted]:
            row = self._rows.pop(name)
            self._cache.keep(row, 0, 0)
            self._free.append(row)
        spans = []
        for name, prompt in wanted.items():
            if name not in self._rows and self._cache.pages_of(len(prompt) - 1) <= self._cache.num_free_pages:
                self._rows[name] = self._free.pop()
                self._cache.clear(self._rows[name])  # an earlier prompt may have left numbers that are not finite
                spans.append(Span(self._rows[name], prompt, 0, len(prompt) - 1, prompt))
                self._cache.open(self._rows[name], 0, len(prompt) - 1)
        forwards = self._runner.read(self._cache, spans)
        for span in spans:
            self._cache.close(span.row)
        return sum(span.stop for span in spans), forwards

    def copy(self, prompt: np.ndarray, cache: SlotCache, row: int) -> int:
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

    def restart(self) -> None:
        """Forgets all prompts of an earlier run, where they take memory from the rows."""
        if self._cache.num_free_pages < UNLIMITED:
            self._rows.clear()
            self._free = list(range(self.num_rows))
            self._cache.restart()


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
        prompt_length: longest prompt.
    """

    def __init__(self, runner: ModelRunner, cache: SlotCache, spare: SlotCache | None, prompts: PromptReader | None,
                 options: Options, ladder: Ladder, padding: int, longest: int, prompt_length: int):
        self.runner, self.cache, self.spare, self.prompts = runner, cache, spare, prompts
        self._options, self._ladder, self._padding, self._longest = options, ladder, padding, longest
        self._prompt_length = prompt_length
        self._unread: list[Slot] = []
        self.reset()

    def reset(self) -> None:
        """Forgets the pending reads of an earlier run, and what its chains held."""
        self._unread = []
        if self.runner.adaptive:
            self.runner.adaptive.reset()
        for cache in (self.cache, self.spare, self.prompts):
            if cache is not None:
                cache.restart()

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
        self.cache.extend(np.minimum(tops + reach, self._longest))
        return keys

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return PAGE_SIZE

    def pages_of_step(self, tops: np.ndarray, reach: int) -> int:
        """Number of pages that the pending reading and the steps up to `reach` positions after `tops` take."""
        unread = sum(self.cache.pages_of(len(slot.contents.held) - slot.contents.filled) + 1 for slot in self._unread)
        return unread + self.cache.pages_to_extend(np.minimum(tops + reach, self._longest))

    def pages_to_place(self, count: int) -> int:
        """A bound on the pages that placing `count` operations takes: each copies the ends of up to four spans."""
        return self.cache.pages_of(1) * 4 * count

    def pages_to_follow(self, count: int) -> int:
        """A bound on the pages that so many rows take when they part from their leaders."""
        return self.cache.pages_of(1) * 2 * count

    def pages_to_begin(self, slots: Sequence[Slot]) -> int:
        """Number of pages that slots without a row take to begin their operations."""
        missing = sum(self.cache.pages_of(len(slot.contents.held) - slot.contents.filled) for slot in slots)
        return missing + self.pages_to_place(len(slots))

    def pages_to_score(self, length: int) -> int:
        """A bound on the pages that a score in a sequence of `length` tokens takes."""
        return self.cache.pages_of(length + self._margin) + 2

    def pages_to_admit(self, reading: bool) -> int:
        """A bound on the pages that a new chain takes at first, where `reading` is whether prompts are read ahead for it."""
        ahead = self.prompts.num_rows if self.prompts is not None and reading else 1
        return ahead * self.cache.pages_of(self._prompt_length) + self.pages_to_place(1)

    def forget_prompts(self) -> bool:
        """Drops the prompts that were read ahead: their chains read them again. Returns whether this has freed pages."""
        before = self.cache.num_free_pages
        if self.prompts is not None:
            self.prompts.read([])
        return self.cache.num_free_pages > before

    def holds_pages(self, slot: Slot) -> bool:
        """Whether a slot that does not draw has pages."""
        if slot.row is None and slot.offloaded is None:
            return False
        home = self._place_of(slot)
        return any(cache is not None and cache.has_pages(home.row) for cache in (home.cache, home.spare))

    def open(self, slot: Slot, position: int) -> None:
        """Lets the next steps write a slot's row from `position` on. Blocks of the draft's grid begin before it."""
        self.cache.open(slot.place, max(0, position - self._margin), position + 1)

    def close(self, slot: Slot) -> None:
        """Ends the writing to a slot's row."""
        self.cache.close(slot.place)

    def open_to_score(self, slot: Slot, start: int, stop: int) -> None:
        """Lets a score write positions `start` to `stop - 1` of a slot's row, and the draft's blocks around them."""
        self.cache.open(slot.place, max(0, start - self._margin), min(stop + self._margin, self.cache.length))

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
        home = self._place_of(slot, len(sequence) if along is None else max(len(sequence), along.sequence_length))
        if home.spare is not None and done.kept < done.restored:
            home.cache.copy(home.spare, home.row, home.row, done.kept, done.restored)
        if done.source is not None:
            source = self._place_of(others[done.source])
            home.cache.copy(source.cache, source.row, home.row, done.restored, done.forked)
        if home.spare is not None and done.saved[0] < done.saved[1]:
            home.spare.reserve(home.cache.length)  # spare rows grow only when one is written: plain draws never need them
            home.spare.copy(home.cache, home.row, home.row, *done.saved)
        home.cache.keep(home.row, 0, done.forked)
        if home.spare is not None:
            home.spare.keep(home.row, slot.contents.saved_from, len(slot.contents.saved))
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
            self.cache.follow(leader.place, slot.place, start, length)

    def move_out(self, slot: Slot, to_host: bool = False) -> None:
        """Moves a slot's keys and values out of its row: to the host's memory too if no page may be free for their ends."""
        held, home = slot.contents, self._place_of(slot)
        length = max(held.filled, len(held.saved))
        if to_host or self.cache.num_free_pages < self.pages_to_place(1):
            slot.offloaded = SlotPlace(home.cache.on_host(length), None if home.spare is None else home.spare.on_host(length))
        elif held.filled or held.saved_from < len(held.saved):
            slot.offloaded = self._new_offloaded(length)
        else:
            return
        _move(held, home, slot.offloaded)

    def move_in(self, slot: Slot) -> None:
        """Copies a slot's keys and values into its row."""
        held, offloaded, slot.offloaded = slot.contents, slot.offloaded, None
        if offloaded is None:
            return
        self.reserve(max(len(held.held), len(held.saved)))
        _move(held, offloaded, SlotPlace(self.cache, self.spare, slot.place))

    def free(self, slot: Slot) -> None:
        """Frees what the slot of a chain that has ended holds."""
        if slot.row is not None or slot.offloaded is not None:
            _free(self._place_of(slot))
        slot.offloaded = None

    def stop(self, slot: Slot) -> None:
        """Frees what the steps of a draw have written to a slot's row. The slot holds what it held before the draw."""
        if slot in self._unread:
            self._unread.remove(slot)
        self.cache.keep(slot.place, 0, slot.contents.filled)

    def read(self) -> tuple[int, int]:
        """Reads the missing tokens of all rows. Returns the number of tokens and of forwards."""
        slots, self._unread = self._unread, []
        working = [slot for slot in slots if slot.row is not None and slot.operation is not None]
        self.runner.replay(self.cache, [slot.place for slot in working], [slot.contents.filled for slot in working])
        missing = [slot for slot in working if slot.contents.filled < len(slot.contents.held)]
        for slot in missing:
            self.cache.open(slot.place, slot.contents.filled, len(slot.contents.held))
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
        if self.spare is not None and any(saved):
            self.spare.reserve(self.cache.length)
            self.spare.swap(a, b, *saved)
        for part in (self.runner.grid, self.runner.adaptive, self.runner.second):
            if part:
                part.swap(a, b)

    def clear(self, slot: Slot) -> None:
        """Removes numbers that are not finite from a slot and from the prompts that are read ahead."""
        home = self._place_of(slot)
        for cache in (home.cache, home.spare):
            if cache is not None:
                cache.clear(home.row)
        if self.prompts is not None:
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

    @property
    def _margin(self) -> int:
        """Positions before and after its anchor that a block of the draft's grid may write, or that a draft reads again."""
        if self.runner.adaptive:
            return self.runner.adaptive.num_drafted + 1
        return self.runner.grid.block_size if self.runner.grid else 0

    def _new_offloaded(self, length: int) -> SlotPlace:
        return SlotPlace(self.cache.of_one_row(length), None if self.spare is None else self.spare.of_one_row(length))


def _move(held: CachedPrefix, home: SlotPlace, goal: SlotPlace) -> None:
    """Copies what a slot holds from one place to another, and frees the first."""
    goal.cache.copy(home.cache, home.row, goal.row, 0, held.filled)
    if goal.spare is not None and home.spare is not None and held.saved_from < len(held.saved):
        goal.spare.reserve(goal.cache.length)
        goal.spare.copy(home.spare, home.row, goal.row, held.saved_from, len(held.saved))
    _free(home)


def _free(home: SlotPlace) -> None:
    """Frees the memory of a slot."""
    home.cache.keep(home.row, 0, 0)
    if home.spare is not None:
        home.spare.keep(home.row, 0, 0)
