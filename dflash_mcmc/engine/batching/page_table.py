"""Pages of keys and values: which are free, how many rows use each, and which rows have which.

Rows with the same first tokens share pages. A page that several rows use is never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

PAGE_SIZE = 64
"""Positions of a page. The lengths of keys are multiples of it (`ladder.py`)."""
NO_PAGE = 0
"""Stands in a table where a row has no page. Its keys and values are zero. It is never written."""
WASTE = 1
"""Takes what forwards write to closed positions. It is never read."""
NUM_RESERVED = 2


class OutOfPages(MemoryError):
    """No page is free."""


def _nothing(page: int) -> None:
    """What a pool does with a page that has lost its last user, unless something else is set."""


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
        self.freed: Callable[[int], None] = _nothing
        self._spoiled = set[int]()
        self.reset()

    def reset(self) -> None:
        """Takes all pages back."""
        if self._spoiled:
            self._erase(sorted(self._spoiled))
            self._spoiled.clear()
        self._users = np.zeros(self.num_pages + NUM_RESERVED, np.int64)
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
        for part in (held[: pages.start], held[pages.stop :]):
            if part.any():
                self.pool.release(part.tolist(), spoiled)
                part[:] = NO_PAGE
                self._changed = True

    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows."""
        for values in (self.pages, self._open, self.opened):
            values[[a, b]] = values[[b, a]]
        self._changed = True

    def reset(self) -> None:
        """Forgets all pages, which the pool has taken back."""
        self.pages[:], self._open[:], self.opened[:], self._changed = NO_PAGE, WASTE, 0, True
