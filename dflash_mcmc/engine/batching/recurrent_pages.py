"""A cache of pages for a model in which some layers are recurrent (`recurrent_state.py`).

A page has the inputs of its positions, and the snapshots at them: the state after the page's i-th token is that of every row
which has the page. Rows that share a page share its snapshots. The memory of the snapshots is a pool. If it is full, a state
is not kept, and a replay starts from an earlier one.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_mcmc.engine.batching.cache import CacheShape, SlotCache
from dflash_mcmc.engine.batching.page_table import NO_PAGE, NUM_RESERVED
from dflash_mcmc.engine.batching.paged_cache import PagedCache, PagedMemory
from dflash_mcmc.engine.batching.recurrent_rows import HybridRows
from dflash_mcmc.engine.batching.recurrent_shape import RecurrentShape, num_snapshots
from dflash_mcmc.engine.batching.recurrent_state import HybridCache, RecurrentStates, StatePlace, hybrid

_ZERO = StatePlace(0, 0)
"""The state at position 0."""


class StatePages:
    """Inputs and snapshots of recurrent layers, by page.

    Attributes:
        inputs: (layers, pages, page size, width).
        snapshots: one row of states, of which the first is zero.
    """

    def __init__(self, shape: RecurrentShape, num_pages: int, page_size: int, every: int, device: torch.device | str):
        size = len(shape.layers), num_pages + NUM_RESERVED, page_size, shape.width
        self.inputs = torch.zeros(size, dtype=shape.dtype, device=device)
        self.snapshots = RecurrentStates(shape, 1, 1 + num_snapshots(num_pages, page_size, every), device)
        self.reset()

    def reset(self) -> None:
        """Forgets all snapshots."""
        self._free = list(range(self.snapshots.matrices.shape[2] - 1, 0, -1))
        self._places: dict[int, dict[int, StatePlace]] = {}

    def find(self, page: int, count: int) -> StatePlace | None:
        """The place of the state after the first `count` tokens of a page; None if it was not kept."""
        return self._places.get(page, {}).get(count)

    def take(self, page: int, count: int) -> StatePlace | None:
        """A place for the state after the first `count` tokens of a page; None if the memory is full."""
        mine = self._places.setdefault(page, {})
        if count not in mine and self._free:
            mine[count] = StatePlace(0, self._free.pop())
        return mine.get(count)

    def forget(self, page: int, start: int, stop: int) -> None:
        """Frees the states after more than `start` and at most `stop` tokens of a page."""
        mine = self._places.get(page, {})
        for count in [count for count in mine if start < count <= stop]:
            self._free.append(mine.pop(count).at)

    def copy(self, source: int, page: int, start: int, stop: int) -> None:
        """Copies positions `start` to `stop - 1` of a page to another, and the states after them."""
        self.inputs[:, page, start:stop] = self.inputs[:, source, start:stop]
        self.forget(page, start, stop)
        for count, theirs in sorted(self._places.get(source, {}).items()):
            if start < count <= stop and (mine := self.take(page, count)) is not None:
                self.snapshots.copy(*mine, self.snapshots, *theirs)

    def erase(self, pages: list[int]) -> None:
        """Sets the inputs of pages to zero."""
        self.inputs[:, pages] = 0

    def freed(self, page: int) -> None:
        """Frees the states of a page that no row has."""
        for place in self._places.pop(page, {}).values():
            self._free.append(place.at)


class HybridMemory(PagedMemory):
    """Pages of a model with recurrent layers."""

    def __init__(self, shape: CacheShape, num_pages: int, page_size: int, device: torch.device | str = "cpu",
                 companion: CacheShape | None = None, every: int = 1):
        if shape.recurrent is None:
            raise ValueError("this model has no recurrent layers")
        super().__init__(shape, num_pages, page_size, device, companion)
        self.every, self.recurrent = every, shape.recurrent
        self.states = StatePages(shape.recurrent, num_pages, page_size, every, device)
        self.pool.freed = self.states.freed

    def copy(self, source: int, page: int, start: int, stop: int) -> None:
        super().copy(source, page, start, stop)
        self.states.copy(source, page, start, stop)

    def erase(self, numbers: list[int]) -> None:
        super().erase(numbers)
        self.states.erase(numbers)

    def reset(self) -> None:
        super().reset()
        self.states.reset()


class HybridPages(HybridCache, PagedCache):
    """Rows of pages with the states of recurrent layers.

    Args:
        num_recent: number of recent states of a row.
        keeps_recent: whether the rows have recent states. Rows that are only copied do not need them.
    """

    memory: HybridMemory

    def __init__(self, memory: HybridMemory, num_rows: int, length: int, num_recent: int = 2, keeps_recent: bool = True):
        PagedCache.__init__(self, memory, num_rows, length)
        self.snapshots = memory.states.snapshots
        self._write_to = torch.empty(0)
        self._add_states(memory.recurrent, memory.every, num_recent, memory.device, keeps_recent)

    def of_one_row(self, length: int) -> HybridPages:
        """See `PagedCache`. The row has no recent state: one is computed where the row is copied to."""
        return HybridPages(self.memory, 1, self.length, self.num_recent, keeps_recent=False)

    def on_host(self, length: int) -> HybridRows:
        target, *draft = self.memory.shapes
        return HybridRows(target, 1, length, "cpu", draft[0] if draft else None, self.every, self.num_recent)

    def aim(self, rows: slice | torch.Tensor, positions: torch.Tensor, key_length: int) -> None:
        super().aim(rows, positions, key_length)
        self._write_to = self._places(rows, positions)

    def write_inputs(self, number: int, inputs: torch.Tensor) -> None:
        self.memory.states.inputs[number].flatten(0, 1)[self._write_to] = inputs

    def inputs_at(self, number: int, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        size, inputs = self.memory.page_size, self.memory.states.inputs[number]
        at = self.table.pages[rows[:, None], positions // size] * size + positions % size
        return inputs.flatten(0, 1)[torch.from_numpy(at).to(inputs.device)]

    def input_span(self, row: int, start: int, stop: int) -> torch.Tensor:
        size, inputs = self.memory.page_size, self.memory.states.inputs
        at = np.arange(start, stop)
        at = self.table.pages[row, at // size] * size + at % size
        return inputs.flatten(1, 2)[:, torch.from_numpy(at).to(inputs.device)]

    def snapshot(self, row: int, number: int) -> StatePlace | None:
        if not number:
            return _ZERO
        page, count = self._page_of(row, number)
        return None if page == NO_PAGE else self.memory.states.find(page, count)

    def place_snapshot(self, row: int, number: int) -> StatePlace | None:
        return self.memory.states.take(*self._page_of(row, number))

    def _forget_snapshot(self, row: int, number: int) -> None:
        page, count = self._page_of(row, number)
        self.memory.states.forget(page, count - 1, count)

    def _page_of(self, row: int, number: int) -> tuple[int, int]:
        """The page of a row with the token before position `number * every`, and the number of its tokens before it."""
        index, last = divmod(number * self.every - 1, self.memory.page_size)
        return int(self.table.pages[row, index]), last + 1

    def copy(self, source: SlotCache, source_row: int, row: int, start: int, stop: int) -> None:
        """See `PagedCache`. Pages have their states. Those of a cache without pages are copied, as far as it has them."""
        super().copy(source, source_row, row, start, stop)
        theirs = hybrid(source)
        if not isinstance(theirs, HybridPages):
            size, states = self.memory.page_size, self.memory.states
            for index in self.table.span(start, stop):
                page, first, last = int(self.table.pages[row, index]), max(start, index * size), min(stop, (index + 1) * size)
                states.inputs[:, page, first - index * size : last - index * size] = theirs.input_span(source_row, first, last)
            self._copy_snapshots(theirs, source_row, row, start, stop)
        self._copy_recent(theirs, source_row, row, stop)

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        known = self.known[[b, a]]
        super().swap(a, b, length_a, length_b)
        self._swap_recent(a, b, known)

    def clear(self, row: int | slice = slice(None)) -> None:
        super().clear(row)
        self._clear_recent(row)
