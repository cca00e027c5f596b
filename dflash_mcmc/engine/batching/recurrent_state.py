"""The states of recurrent layers, by position, and the inputs that lead from one state to the next.

Keys and values of a token stay valid when later tokens are dropped. A recurrent state does not: it has to be known at the
position to which a row is rolled back. A row therefore keeps

    inputs      the input of each recurrent layer at every position, where an attention layer keeps keys and values
    snapshots   the states at positions 0, `every`, 2 `every`, ...
    recent      the states at the latest positions, at `position % num_recent`: those that the next steps can start from

The state at a position is the state before its token is fed. A state that is neither a snapshot nor recent is replayed: the
recurrence runs from the last snapshot over the kept inputs (`delta_net.replay`), token by token in every forward, so that its
bits do not depend on how a text was split, nor on which snapshot it starts from.

A page has the inputs of its positions, and the snapshots at them: the state after the page's i-th token is that of every row
which has the page. Rows that share a page share its snapshots. A full pool keeps no further state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine.batching.cache import (
    CacheShape,
    ContiguousCache,
    RecurrentShape,
    RecurrentStates,
    SlotCache,
    SlotLayer,
    num_snapshots,
)
from dflash_mcmc.engine.batching.paged_cache import NO_PAGE, NUM_RESERVED, PagedCache, PagedMemory

_UNKNOWN = -1


class StatePlace(NamedTuple):
    """Where a state is among `RecurrentStates`."""

    row: int
    at: int


class RecurrentLayer(SlotLayer):
    """One recurrent layer of a `HybridCache`. `delta_net.mix` reads and writes its states in each forward."""

    def __init__(self, cache: HybridCache, number: int, shape: RecurrentShape, device: torch.device):
        super().__init__(shape.dtype, device, cache.length)
        self._cache, self._number = cache, number

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Raises TypeError: the layer has no keys and values."""
        raise TypeError("a recurrent layer has no keys and values")

    def begin(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores inputs (rows, queries, width). Returns windows and matrices of the rows before the first query."""
        cache = self._cache
        memory, at = cache.aimed_inputs
        memory[self._number][at] = inputs
        return cache.recent.get(self._number, cache.row_ids, cache.positions[:, 0] % cache.num_recent)

    def keep(self, query: int, windows: torch.Tensor, matrices: torch.Tensor) -> None:
        """Keeps the states after a query: windows (rows, window, channels), matrices (rows, heads, key_dim, value_dim)."""
        cache, number = self._cache, self._number
        if cache.spans is None:
            cache.recent.put(number, cache.row_ids, (cache.positions[:, query] + 1) % cache.num_recent, windows, matrices)
            return
        # After its last token a row reads padding, whose states are not kept.
        (rows, stop), reached = cache.spans[:, [0, 2]].T, cache.spans[:, 1] + query + 1
        for index in np.flatnonzero((reached <= stop) & (reached % cache.every == 0)).tolist():
            place = cache.place_snapshot(int(rows[index]), int(reached[index]) // cache.every)
            if place is not None:
                cache.snapshots.put(number, *place, windows[index], matrices[index])
        for index in np.flatnonzero(reached == stop).tolist():
            row, at = int(rows[index]), int(stop[index]) % cache.num_recent
            cache.recent.put(number, row, at, windows[index], matrices[index])


class HybridCache(SlotCache):
    """A cache for a model in which some layers are recurrent. A subclass has the memory of inputs and snapshots.

    Attributes:
        every: positions between two snapshots.
        num_recent: number of recent states of a row.
        snapshots: the states at multiples of `every`; `snapshot` has their places.
        recent: the latest states of each row; None for a cache whose rows are only copied.
        known: int64 (num_rows,) on the host, the position whose state is recent in each row beside those that the next steps
            write; -1 without such a position.
        spans: int64 (rows, 3): rows, and the positions that the next forward reads in them, without padding; None for a
            decode step.
        aimed_inputs: the next forward's `places_of_inputs`.
    """

    recurrent = True
    snapshots: RecurrentStates

    def _add_states(self, shape: RecurrentShape, every: int, num_recent: int, device: torch.device | str,
                    keeps_recent: bool = True) -> None:
        """Makes the recent states and the recurrent layers. The layers with keys and values are there."""
        self.every, self.num_recent, self.keeps_recent = every, num_recent, keeps_recent
        self.recent = RecurrentStates(shape, self.num_rows if keeps_recent else 0, num_recent, device)
        self.known = np.full(self.num_rows, 0 if keeps_recent else _UNKNOWN)
        self.spans: np.ndarray | None = None
        self.row_ids = self.positions = torch.empty(0)
        self.aimed_inputs = self.positions, tuple[torch.Tensor, ...]()
        self._every_row = torch.arange(self.num_rows, device=device)
        layers: list[SlotLayer] = list(self.slot_layers)
        for index, layer in enumerate(shape.layers):  # in ascending order, so that each lands at its place
            layers.insert(layer, RecurrentLayer(self, index, shape, torch.device(device)))
        self.layers = [*layers]

    @abstractmethod
    def places_of_inputs(self, rows: slice | torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, tuple]:
        """The memory of inputs, (layers, ...), and where in it those of positions, int64 (rows, queries), of rows are."""

    @abstractmethod
    def inputs_at(self, number: int, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """The inputs of a layer at positions, int64 (rows, n), of rows, int64 (rows,): (rows, n, width)."""

    @abstractmethod
    def input_span(self, row: int, start: int, stop: int) -> torch.Tensor:
        """The inputs of all layers at positions `start` to `stop - 1` of a row, (layers, positions, width)."""

    @abstractmethod
    def snapshot(self, row: int, number: int) -> StatePlace | None:
        """The place of a row's state at position `number * every` among the snapshots; None if it was not kept."""

    @abstractmethod
    def place_snapshot(self, row: int, number: int) -> StatePlace | None:
        """The place to which a row's state at position `number * every` is written; None if there is no room for it."""

    def last_snapshots(self, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The last snapshots at or before positions of rows: their positions, int64 (rows,), and places, int64 (2, rows)."""
        numbers, places = positions // self.every, []
        for index, row in enumerate(rows.tolist()):
            while (place := self.snapshot(row, int(numbers[index]))) is None:
                numbers[index] -= 1
            places.append(place)
        return numbers * self.every, np.array(places).T

    def aim(self, rows: slice | torch.Tensor, positions: torch.Tensor, key_length: int) -> None:
        super().aim(rows, positions, key_length)  # type: ignore[safe-super]  # the cache of keys and values is the next class
        self.row_ids, self.positions = self._every_row[rows], positions
        self.aimed_inputs = self.places_of_inputs(rows, positions)

    def follow(self, leader: int, row: int, start: int, stop: int) -> None:
        """See `SlotCache`. The state at `stop` is recent in the leader's row."""
        super().follow(leader, row, start, stop)
        at = stop % self.num_recent
        self.recent.copy(row, at, self.recent, leader, at)
        self.known[row] = stop

    @contextmanager
    def reading(self, spans: np.ndarray) -> Iterator[None]:
        self.spans = spans
        yield
        self.spans = None
        self.known[spans[:, 0]] = spans[:, 2]

    def passed(self, before: np.ndarray, after: np.ndarray) -> None:
        for row in np.flatnonzero(after // self.every > before // self.every).tolist():
            for number in range(int(before[row]) // self.every + 1, int(after[row]) // self.every + 1):
                place = self.place_snapshot(row, number)
                if place is not None:
                    self.snapshots.copy(*place, self.recent, row, number * self.every % self.num_recent)
        self.known[: len(after)] = after

    def _copy_snapshots(self, source: HybridCache, source_row: int, row: int, start: int, stop: int) -> None:
        """Copies the states of another kind of cache at positions `start + 1` to `stop`, as far as it has them."""
        for number in range(start // self.every + 1, stop // self.every + 1):
            theirs = source.snapshot(source_row, number)
            mine = None if theirs is None else self.place_snapshot(row, number)
            if theirs is None or mine is None:
                self._forget_snapshot(row, number)
            else:
                self.snapshots.copy(*mine, source.snapshots, *theirs)

    @abstractmethod
    def _forget_snapshot(self, row: int, number: int) -> None:
        """Notes that a row's state at position `number * every` was not kept."""

    def _copy_recent(self, source: HybridCache, source_row: int, row: int, stop: int) -> None:
        """Copies the state at `stop`, if the source has it."""
        self.known[row] = _UNKNOWN
        if self.keeps_recent and source.known[source_row] == stop:
            at = stop % self.num_recent
            self.recent.copy(row, at, source.recent, source_row, at)
            self.known[row] = stop

    def _swap_recent(self, a: int, b: int, known: np.ndarray) -> None:
        """Exchanges the recent states of two rows, which then have the states at positions `known`, int64 (2,)."""
        self.recent.swap(a, b, self.num_recent)
        self.known[[a, b]] = known

    def _clear_recent(self, row: int | slice) -> None:
        if self.keeps_recent:
            self.recent.clear(row)
            self.known[row] = 0


def hybrid(cache: SlotCache) -> HybridCache:
    """The same cache. Raises TypeError for a cache without recurrent states."""
    if not isinstance(cache, HybridCache):
        raise TypeError(f"{type(cache).__name__} has no recurrent states")
    return cache


class HybridRows(HybridCache, ContiguousCache):
    """A contiguous cache with inputs and snapshots of recurrent layers in each row.

    Args:
        every: positions between two snapshots.
        num_recent: number of recent states of a row.

    Attributes:
        inputs: (layers, num_rows, length, width), the inputs of the recurrent layers.
    """

    def __init__(self, shape: CacheShape, num_rows: int, length: int, device: torch.device | str = "cpu",
                 companions: tuple[CacheShape, ...] = (), every: int = 1, num_recent: int = 2):
        ContiguousCache.__init__(self, shape, num_rows, length, device, companions)
        if shape.recurrent is None:
            raise ValueError("this model has no recurrent layers")
        recurrent = shape.recurrent
        sizes = len(recurrent.layers), num_rows, length, recurrent.width
        self.inputs = torch.zeros(sizes, dtype=recurrent.dtype, device=device)
        self.snapshots = RecurrentStates(recurrent, num_rows, length // every + 1, device)
        self._kept = np.ones((num_rows, length // every + 1), bool)
        self._add_states(recurrent, every, num_recent, device)

    def on_host(self, length: int) -> HybridRows:
        return HybridRows(self._shape, 1, length, "cpu", self._companions, self.every, self.num_recent)

    def reserve(self, length: int) -> None:
        if length > self.length:
            self.inputs = torch.nn.functional.pad(self.inputs, (0, 0, 0, length - self.length))
            self.snapshots.extend(length // self.every + 1)
            more = length // self.every + 1 - self._kept.shape[1]
            self._kept = np.pad(self._kept, ((0, 0), (0, more)), constant_values=True)
        super().reserve(length)

    def places_of_inputs(self, rows: slice | torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, tuple]:
        return self.inputs, (self._every_row[rows][:, None], positions)

    def inputs_at(self, number: int, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        device = self.inputs.device
        return self.inputs[number][torch.from_numpy(rows[:, None]).to(device), torch.from_numpy(positions).to(device)]

    def input_span(self, row: int, start: int, stop: int) -> torch.Tensor:
        return self.inputs[:, row, start:stop]

    def snapshot(self, row: int, number: int) -> StatePlace | None:
        return StatePlace(row, number) if self._kept[row, number] else None

    def place_snapshot(self, row: int, number: int) -> StatePlace:
        self._kept[row, number] = True
        return StatePlace(row, number)

    def _forget_snapshot(self, row: int, number: int) -> None:
        self._kept[row, number] = False

    def copy(self, source: SlotCache, source_row: int, row: int, start: int, stop: int) -> None:
        """See `SlotCache`. States at positions `start + 1` to `stop` are copied too, as far as the source has them."""
        super().copy(source, source_row, row, start, stop)
        theirs = hybrid(source)
        self.inputs[:, row, start:stop] = theirs.input_span(source_row, start, stop)
        if isinstance(theirs, HybridRows):
            taken = slice(start // self.every + 1, stop // self.every + 1)
            self.snapshots.copy(row, taken, theirs.snapshots, source_row, taken)
            self._kept[row, taken] = theirs._kept[source_row, taken]
        else:
            self._copy_snapshots(theirs, source_row, row, start, stop)
        self._copy_recent(theirs, source_row, row, stop)

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        length, known = max(length_a, length_b), self.known[[b, a]]
        super().swap(a, b, length_a, length_b)
        if length_a and length_b:  # else one row has been copied over the other
            kept = self.inputs[:, a, :length].clone()
            self.inputs[:, a, :length] = self.inputs[:, b, :length]
            self.inputs[:, b, :length] = kept
            self.snapshots.swap(a, b, length // self.every + 1)
            self._kept[[a, b]] = self._kept[[b, a]]
        self._swap_recent(a, b, known)

    def clear(self, row: int | slice = slice(None)) -> None:
        super().clear(row)
        self.inputs[:, row] = 0
        self.snapshots.clear(row)
        self._kept[row] = True
        self._clear_recent(row)


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
        self._free: list[int] = []
        self._places: dict[int, dict[int, StatePlace]] = {}
        self.reset()

    def reset(self) -> None:
        """Forgets all snapshots."""
        self._free = list(range(self.snapshots.matrices.shape[2] - 1, 0, -1))
        self._places = {}

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
                 companions: tuple[CacheShape, ...] = (), every: int = 1):
        if shape.recurrent is None:
            raise ValueError("this model has no recurrent layers")
        super().__init__(shape, num_pages, page_size, device, companions)
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
        self._add_states(memory.recurrent, memory.every, num_recent, memory.device, keeps_recent)

    def of_one_row(self, length: int) -> HybridPages:
        """See `PagedCache`. The row has no recent state: one is computed where the row is copied to."""
        return HybridPages(self.memory, 1, self.length, self.num_recent, keeps_recent=False)

    def on_host(self, length: int) -> HybridRows:
        target, *companions = self.memory.shapes
        return HybridRows(target, 1, length, "cpu", tuple(companions), self.every, self.num_recent)

    def places_of_inputs(self, rows: slice | torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, tuple]:
        return self.memory.states.inputs.flatten(1, 2), (self._places(rows, positions),)

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
