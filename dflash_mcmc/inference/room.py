"""Frees pages of keys and values for the operations that need them now.

A draw that is stopped is drawn again later, with the same keys and from the same base. Its tokens are therefore the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dflash_mcmc.errors import UserError
from dflash_mcmc.inference.slot_memory import SlotMemory
from dflash_mcmc.inference.slots import Slot
from dflash_mcmc.ops import Draw


class Room:
    """Frees pages.

    Args:
        memory: keys and values of the slots.
        stop: stops a draw, and the draws that share its forwards. They wait for a row again.
        offload: moves what another slot holds to the host's memory.
    """

    def __init__(self, memory: SlotMemory, stop: Callable[[Slot], None], offload: Callable[[Slot], None]):
        self._memory, self._stop, self._offload = memory, stop, offload

    def suffices(self, pages: int) -> bool:
        """Whether so many pages are free."""
        return self._memory.num_free_pages >= pages

    def make(self, pages: Callable[[], int], slots: Callable[[], Iterable[Slot]], pinned: Slot | None = None) -> None:
        """Frees pages until `pages()` are free. Raises UserError if they are more than there are.

        The youngest draws are stopped first, and the oldest goes on. Then slots that do not draw are moved to the host's
        memory. They come back with the same bits.

        Args:
            slots: the slots of all live chains.
            pinned: a slot that goes on.
        """
        while not self.suffices(pages()):
            drawing = [slot for slot in slots() if slot is not pinned and slot.leader is None and _draws(slot)]
            oldest = None if pinned else min(drawing, key=_age, default=None)
            young = [slot for slot in drawing if slot is not oldest]
            if young:
                self._stop(max(young, key=_age))
                continue
            idle = [slot for slot in slots() if slot is not pinned and _waits(slot) and self._memory.holds_pages(slot)]
            if not idle:
                raise UserError(f"hardware.memory_gb: the cache has {self._memory.num_pages} pages of "
                                f"{self._memory.page_size} tokens, and one chain needs more; allowed: more memory, a smaller "
                                "dataset.max_new_tokens, or fewer draws together")
            self._offload(idle[-1])


def _draws(slot: Slot) -> bool:
    """Whether a slot has a row and a draw in progress."""
    return slot.row is not None and isinstance(slot.operation, Draw)


def _waits(slot: Slot) -> bool:
    """Whether a slot rests, or waits for a row."""
    return slot.row is None or slot.operation is None


def _age(slot: Slot) -> tuple[float, int]:
    """A number that is larger for a draw that has begun later."""
    return slot.clock, slot.place
