"""Frees pages of keys and values for the operations that need them now.

A draw that is stopped is drawn again later, with the same keys and from the same base. Its tokens are therefore the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from dflash_mcmc.engine.batching.decode_loop import DecodeLoop
from dflash_mcmc.engine.batching.live_chain import LiveChain
from dflash_mcmc.engine.batching.slot_memory import SlotMemory
from dflash_mcmc.engine.batching.slots import Slot
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Draw


class Room:
    """Frees pages.

    Args:
        rows: the slot of each row of the batch.
        late: slots that wait for a row.
        memory, loop: hold the state of the rows.

    Attributes:
        chains: the live chains.
        ending: slots whose draws have just ended. They keep their rows.
    """

    def __init__(self, rows: list[Slot | None], late: deque[Slot], memory: SlotMemory, loop: DecodeLoop):
        self._rows, self._late, self._memory, self._loop = rows, late, memory, loop
        self.chains: dict[LiveChain, None] = {}
        self.ending: list[Slot] = []

    def suffices(self, pages: int) -> bool:
        """Whether so many pages are free."""
        return self._memory.num_free_pages >= pages

    def make(self, pages: Callable[[], int], pinned: Slot | None = None) -> None:
        """Frees pages until `pages()` are free. Raises UserError if they are more than there are.

        The youngest draws are stopped first, and the oldest goes on. Then slots that do not draw are moved to the host's
        memory. They come back with the same bits.

        Args:
            pinned: a slot that goes on.
        """
        while not self.suffices(pages()):
            drawing = [slot for slot in self._slots() if slot is not pinned and slot.leader is None and _draws(slot)]
            oldest = None if pinned else min(drawing, key=_age, default=None)
            young = [slot for slot in drawing if slot is not oldest]
            if young:
                self._stop(max(young, key=_age))
                continue
            idle = [slot for slot in self._slots() if slot is not pinned and _waits(slot) and self._memory.holds_pages(slot)]
            if not idle:
                raise UserError(f"hardware.memory_gb: the cache has {self._memory.num_pages} pages of "
                                f"{self._memory.page_size} tokens, and one chain needs more; allowed: more memory, a smaller "
                                "dataset.max_new_tokens, or fewer draws together")
            self._offload(idle[-1])

    def _slots(self) -> Iterator[Slot]:
        return (slot for chain in self.chains for slot in chain.slots if slot not in self.ending)

    def _stop(self, slot: Slot) -> None:
        """Stops a draw, and those that share its forwards. They wait for a row, before the others that wait."""
        for each in [other for other in slot.chain.slots if other is slot or other.leader is slot]:
            if each.row is not None:
                self._memory.stop(each)
                self._take_row(each, each.row)
                each.leader, each.walk = None, []
                self._late.appendleft(each)

    def _offload(self, slot: Slot) -> None:
        """Moves what a slot that does not draw holds to the host's memory."""
        if slot.row is not None:
            self._take_row(slot, slot.row)
        self._memory.offload(slot)

    def _take_row(self, slot: Slot, row: int) -> None:
        self._loop.drop(row, 0)
        self._memory.stash(slot)
        self._rows[row] = None
        slot.row = None


def _draws(slot: Slot) -> bool:
    """Whether a slot has a row and a draw in progress."""
    return slot.row is not None and isinstance(slot.operation, Draw)


def _waits(slot: Slot) -> bool:
    """Whether a slot rests, or waits for a row."""
    return slot.row is None or slot.operation is None


def _age(slot: Slot) -> tuple[float, int]:
    """A number that is larger for a draw that has begun later."""
    return slot.clock, slot.place
