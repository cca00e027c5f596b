"""A KV cache whose rows are lists of pages, so that its memory follows the text that is there (Kwon et al. 2023).

Copies share pages: the row of a chain and its spare row, chains with the same prompt, and particles with the same first
tokens. A page that several rows use is never written. A layer gathers the pages of the aimed rows for its attention, which
takes memory for the keys and values of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from dflash_mcmc.engine.batching.cache import CacheShape, ContiguousCache, SlotCache, SlotLayer

PAGE_SIZE = 64
"""Positions of a page. The lengths of keys are multiples of it (`ladder.py`)."""
NO_PAGE = 0
"""Stands in a table where a row has no page. Its keys and values are zero. It is never written."""
WASTE = 1
"""Takes what forwards write to closed positions. It is never read."""
NUM_RESERVED = 2


class OutOfPages(MemoryError):
    """No page is free."""


class PagePool:
    """Free pages, and the number of users of the others.

    Args:
        num_pages: number of pages, without the two that no row has.
        erase: sets pages to zero.

    Attributes:
        freed: is called with each page that loses its last user.
    """

    def __init__(self, num_pages: int, erase: Callable[[list[int]], None]):
        self.num_pages, self._erase = num_pages, erase
        self.freed: Callable[[int], None] = lambda page: None
        self._spoiled = set[int]()
        self._users = np.zeros(num_pages + NUM_RESERVED, np.int64)
        self._free: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Takes all pages back."""
        if self._spoiled:
            self._erase(sorted(self._spoiled))
            self._spoiled.clear()
        self._users[:] = 0
        self._free = list(range(self.num_pages + NUM_RESERVED - 1, NUM_RESERVED - 1, -1))

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self) -> int:
        """A free page, with one user. Raises OutOfPages."""
        if not self._free:
            raise OutOfPages
        page = self._free.pop()
        self._users[page] = 1
        return page

    def share(self, page: int) -> int:
        """Adds a user."""
        self._users[page] += 1
        return page

    def is_shared(self, page: int) -> bool:
        """Whether a page has several users."""
        return bool(self._users[page] > 1)

    def release(self, pages: Iterable[int], spoiled: bool = False) -> None:
        """Removes a user from each of these pages; NO_PAGE stands for none.

        Args:
            spoiled: whether the pages may hold NaN. They are then set to zero before they are used again.
        """
        for page in pages:
            if page == NO_PAGE:
                continue
            self._users[page] -= 1
            if spoiled:
                self._spoiled.add(page)
            if not self._users[page]:
                self._free.append(page)
                self.freed(page)
                if page in self._spoiled:
                    self._erase([page])
                    self._spoiled.discard(page)


class PageTable:
    """The pages of some rows.

    Attributes:
        pages: int64 (num_rows, pages of a row) on the host: the page at a position; NO_PAGE where there is none.
        opened: int64 (num_rows,), the number of a row's first page that is not open; 0 for a closed row.
        read_from, write_to: int64 tensors of the same shape on the device, the pages that forwards read and write.
    """

    def __init__(self, pool: PagePool, page_size: int, num_rows: int, length: int, device: torch.device | str):
        self.pool, self.page_size = pool, page_size
        self.pages = np.full((num_rows, -(-length // page_size)), NO_PAGE, np.int64)
        self._open = np.full_like(self.pages, WASTE)
        self.opened = np.zeros(num_rows, np.int64)
        self.read_from, self.write_to = (torch.from_numpy(pages.copy()).to(device) for pages in (self.pages, self._open))
        self._changed = False

    def send(self) -> None:
        """Copies the tables to the device, if they have changed."""
        if self._changed:
            self.read_from.copy_(torch.from_numpy(self.pages))
            self.write_to.copy_(torch.from_numpy(self._open))
            self._changed = False

    def span(self, start: int, stop: int) -> range:
        """Numbers of the pages with positions `start` to `stop - 1`."""
        return range(start // self.page_size, -(-stop // self.page_size) if stop > start else start // self.page_size)

    def covers(self, page: int, start: int, stop: int) -> bool:
        """Whether all positions of a row's page are among `start` to `stop - 1`."""
        return start <= page * self.page_size and (page + 1) * self.page_size <= stop

    def own(self, row: int, page: int) -> tuple[int, int]:
        """Gives a row a page that only it uses. Returns the page before, whose content may be wanted, and the new one."""
        before = int(self.pages[row, page])
        if before != NO_PAGE and not self.pool.is_shared(before):
            return before, before
        self.put(row, page, self.pool.take())
        return before, int(self.pages[row, page])

    def put(self, row: int, page: int, number: int) -> None:
        """Replaces a row's page by one that the row has been counted as a user of."""
        self.pool.release([int(self.pages[row, page])])
        self.pages[row, page], self._changed = number, True

    def is_open(self, row: int, page: int) -> bool:
        """Whether forwards may write to a row's page."""
        return bool(self._open[row, page] != WASTE)

    def open(self, row: int, pages: range) -> None:
        """Lets forwards write to a row's pages, which only this row uses."""
        self._open[row, pages.start : pages.stop] = self.pages[row, pages.start : pages.stop]
        self.opened[row], self._changed = max(int(self.opened[row]), pages.stop), True

    def close(self, row: int) -> None:
        """Sends the writes of forwards to a row to the page of waste."""
        if self.opened[row]:
            self._open[row], self.opened[row], self._changed = WASTE, 0, True

    def keep(self, row: int, pages: range, spoiled: bool = False) -> None:
        """Releases the row's other pages."""
        self.close(row)
        held = self.pages[row]
        for dropped in (held[: pages.start], held[pages.stop :]):
            if dropped.any():
                self.pool.release(dropped.tolist(), spoiled)
                dropped[:] = NO_PAGE
                self._changed = True

    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows."""
        for values in (self.pages, self._open, self.opened):
            values[[a, b]] = values[[b, a]]
        self._changed = True

    def reset(self) -> None:
        """Forgets all pages, which the pool has taken back."""
        self.pages[:], self._open[:], self.opened[:], self._changed = NO_PAGE, WASTE, 0, True


class PagedLayer(SlotLayer):
    """Keys and values of one decoder layer: each (num_heads, pages, page size, dim)."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int):
        super().__init__(keys.dtype, keys.device, length)
        self.keys, self.values = keys, values
        self.read_from, self.write_to = torch.empty(0), torch.empty(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values, each (rows, heads, queries, dim), and returns those of the rows up to `key_length`.

        What is returned is stored heads first, so that attention can merge heads and rows without a copy.
        """
        return self._updated(self.keys, key_states), self._updated(self.values, value_states)

    def _updated(self, memory: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        heads, _, page_size, dim = memory.shape
        memory.view(heads, -1, dim)[:, self.write_to] = states.transpose(0, 1)
        gathered = memory.view(heads, -1, page_size * dim).index_select(1, self.read_from)
        return gathered.view(heads, len(states), self.key_length, dim).transpose(0, 1)


class Pages:
    """The memory of all pages of a model.

    Attributes:
        keys, values: (num_layers, num_heads, pages, page size, dim).
    """

    def __init__(self, shape: CacheShape, num_pages: int, page_size: int, device: torch.device | str):
        size = shape.num_layers, shape.num_heads, num_pages + NUM_RESERVED, page_size
        self.keys, self.values = (
            torch.zeros(*size, dim, dtype=shape.dtype, device=device)
            for dim in (shape.key_dim, shape.value_dim)
        )

    def copy(self, source: int, page: int, start: int, stop: int) -> None:
        """Copies positions `start` to `stop - 1` of a page to another."""
        for memory in (self.keys, self.values):
            memory[:, :, page, start:stop] = memory[:, :, source, start:stop]

    def erase(self, pages: list[int]) -> None:
        """Sets pages to zero."""
        for memory in (self.keys, self.values):
            memory[:, :, pages] = 0


class PagedMemory:
    """The pages of a model and of its companions, which belong to the same positions of the same rows.

    Args:
        num_pages: number of pages that rows can have.
        page_size: positions of a page; lengths of keys are multiples of it.
        companions: shapes of the keys and values of a draft and of another model, as far as there are any.
    """

    def __init__(self, shape: CacheShape, num_pages: int, page_size: int, device: torch.device | str = "cpu",
                 companions: tuple[CacheShape, ...] = ()):
        self.page_size, self.device = page_size, device
        self.shapes = [shape, *companions]
        self.pages = [Pages(each, num_pages, page_size, device) for each in self.shapes]
        self.pool = PagePool(num_pages, self.erase)

    def copy(self, source: int, page: int, start: int, stop: int) -> None:
        """Copies positions of a page to another."""
        for pages in self.pages:
            pages.copy(source, page, start, stop)

    def erase(self, numbers: list[int]) -> None:
        """Sets pages to zero."""
        for pages in self.pages:
            pages.erase(numbers)

    def reset(self) -> None:
        """Takes all pages back."""
        self.pool.reset()


class PagedCache(SlotCache):
    """Rows of pages. All caches of an engine share one memory.

    Args:
        length: the longest row.
        number: the number of the companion, whose rows are those of the target's cache; 0 for the target.
        table: the pages of the rows; None for empty rows.
    """

    def __init__(self, memory: PagedMemory, num_rows: int, length: int, table: PageTable | None = None, number: int = 0):
        self.memory, self._pages = memory, memory.pages[number]
        self.table = table or PageTable(memory.pool, memory.page_size, num_rows, length, memory.device)
        more = len(memory.pages) > number + 1
        companion = PagedCache(memory, num_rows, length, self.table, number + 1) if more else None
        self._layers = [PagedLayer(keys, values, self.length)
                        for keys, values in zip(self._pages.keys, self._pages.values, strict=True)]
        super().__init__(self._layers, num_rows, companion)

    @property
    def length(self) -> int:
        return self.table.pages.shape[1] * self.memory.page_size

    def of_one_row(self, length: int) -> PagedCache:
        """See `SlotCache`. The row can be as long as those of this cache, and can share their pages."""
        return PagedCache(self.memory, 1, self.length)

    def on_host(self, length: int) -> ContiguousCache:
        target, *companions = self.memory.shapes
        return ContiguousCache(target, 1, length, "cpu", tuple(companions))

    def open(self, row: int, start: int, stop: int) -> None:
        table = self.table
        pages = table.span(start, stop)
        for page in pages:
            self._own(row, page)
        table.open(row, pages)

    def close(self, row: int) -> None:
        self.table.close(row)

    def keep(self, row: int, start: int, stop: int) -> None:
        self.table.keep(row, self.table.span(start, stop))

    def extend(self, stops: np.ndarray) -> None:
        for row in np.flatnonzero(self._lacking(stops)).tolist():
            self.open(row, int(self.table.opened[row]) * self.memory.page_size, int(stops[row]))
        self.send()

    def restart(self) -> None:
        self.table.reset()
        self.memory.reset()

    @property
    def num_pages(self) -> int:
        return self.memory.pool.num_pages

    @property
    def num_free_pages(self) -> int:
        return self.memory.pool.num_free

    def has_pages(self, row: int) -> bool:
        return bool((self.table.pages[row] != NO_PAGE).any())

    def pages_of(self, length: int) -> int:
        return -(-length // self.memory.page_size)

    def pages_to_extend(self, stops: np.ndarray) -> int:
        return int(self._lacking(stops).sum())

    def _lacking(self, stops: np.ndarray) -> np.ndarray:
        """Number of pages that each of the first rows lacks to be open up to these positions, int64 (rows,)."""
        opened = self.table.opened[: len(stops)]
        return np.where(opened > 0, np.maximum(-(-stops // self.memory.page_size) - opened, 0), 0)

    def aim(self, rows: slice | torch.Tensor, positions: torch.Tensor, key_length: int) -> None:
        self.send()
        write_to = self._places(rows, positions)
        read_from = self.table.read_from[rows, : key_length // self.memory.page_size].reshape(-1)
        for layer in self._layers:
            layer.read_from, layer.write_to, layer.key_length = read_from, write_to, key_length

    def send(self) -> None:
        """Copies the tables to the device. A captured graph does not: it reads what was sent before its replay."""
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self.table.send()

    def write(self, rows: slice | torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.send()
        at = self._places(rows, positions)
        for memory, new in ((self._pages.keys, keys), (self._pages.values, values)):
            memory.flatten(2, 3)[:, :, at] = new.transpose(1, 2)

    def at(self, rows: slice | torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.send()
        return self._kept(self._places(rows, positions))

    def held(self, rows: slice | torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.send()
        return self._kept(self._places(rows, positions, self.table.read_from))

    def _kept(self, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at places in the memory of all pages, int64 (rows, queries)."""
        keys, values = (memory.flatten(2, 3)[:, :, at].transpose(1, 2) for memory in (self._pages.keys, self._pages.values))
        return keys, values

    def _places(self, rows: slice | torch.Tensor, positions: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        """The places in the memory of all pages to which positions of rows are written, int64 (rows, queries).

        Args:
            table: pages of rows; None for those that are written.
        """
        size = self.memory.page_size
        return (self.table.write_to if table is None else table)[rows].gather(1, positions // size) * size + positions % size

    def copy(self, source: SlotCache, source_row: int, row: int, start: int, stop: int) -> None:
        """See `SlotCache`. Raises OutOfPages. Whole pages of this memory are shared, unless the source's row is open there."""
        if not isinstance(source, PagedCache):
            self._copy_from_host(source, source_row, row, start, stop)
            return
        table, size = self.table, self.memory.page_size
        for page in table.span(start, stop):
            theirs = int(source.table.pages[source_row, page])
            if table.covers(page, start, stop) and not source.table.is_open(source_row, page):
                table.put(row, page, self.memory.pool.share(theirs))
            else:
                self.memory.copy(theirs, self._own(row, page), max(start - page * size, 0), min(stop - page * size, size))

    def _copy_from_host(self, source: SlotCache, source_row: int, row: int, start: int, stop: int) -> None:
        """Copies positions of a cache without pages into a row."""
        size, caches = self.memory.page_size, source.chain()
        for page in self.table.span(start, stop):
            now, first, last = self._own(row, page), max(start, page * size), min(stop, (page + 1) * size)
            for cache, pages in zip(caches, self.memory.pages, strict=True):
                for memory, copied in zip((pages.keys, pages.values), cache.span(source_row, first, last), strict=True):
                    memory[:, :, now, first - page * size : last - page * size] = copied

    def _own(self, row: int, page: int) -> int:
        """Makes a page of a row its own, with what it held. Returns its number. Raises OutOfPages."""
        before, now = self.table.own(row, page)
        if before not in (now, NO_PAGE):
            self.memory.copy(before, now, 0, self.memory.page_size)
        return now

    def span(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = self.table.span(start, stop)
        held = torch.from_numpy(self.table.pages[row, pages.start : pages.stop])
        first = pages.start * self.memory.page_size
        keys, values = (memory[:, :, held.to(memory.device)].flatten(2, 3)[:, :, start - first : stop - first]
                        for memory in (self._pages.keys, self._pages.values))
        return keys, values

    def follow(self, leader: int, row: int, start: int, stop: int) -> None:
        opened = int(self.table.opened[leader])
        self.close(leader)  # closed pages can be shared
        self.copy(self, leader, row, start, stop)
        if opened:
            self.open(leader, stop, opened * self.memory.page_size)

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        self.table.swap(a, b)

    def clear(self, row: int | slice = slice(None)) -> None:
        rows = [row] if isinstance(row, int) else range(*row.indices(self.num_rows))
        for each in rows:
            self.table.keep(each, range(0), spoiled=True)
        self.memory.erase([WASTE])  # steps of closed rows have written there what they computed, NaN included
