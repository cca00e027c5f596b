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
    """

    def __init__(self, memory: SlotMemory, stop: Callable[[Slot], None]):
        self._memory, self._stop = memory, stop

    def suffices(self, pages: int) -> bool:
        """Whether so many pages are free."""
        return self._memory.num_free_pages >= pages

    def make(self, pages: Callable[[], int], slots: Callable[[], Iterable[Slot]], pinned: Slot | None = None) -> None:
        """Frees pages until `pages()` are free. Raises UserError if they are more than there are.

        The youngest draws are stopped first, and the oldest goes on. Then slots without a row forget what they hold. It is
        read again when it is needed, with other last bits.

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
            idle = [slot for slot in slots() if slot is not pinned and not _draws(slot) and _holds(slot)]
            if not idle:
                raise UserError(f"hardware.memory_gb: the cache has {self._memory.num_pages} pages of "
                                f"{self._memory.page_size} tokens, and one chain needs more; allowed: more memory, a smaller "
                                "dataset.max_new_tokens, or fewer draws together")
            self._memory.forget(idle[-1])


def _draws(slot: Slot) -> bool:
    """Whether a slot has a row and a draw in progress."""
    return slot.row is not None and isinstance(slot.operation, Draw)


def _holds(slot: Slot) -> bool:
    """Whether a slot holds keys or values."""
    return bool(slot.contents.filled or len(slot.contents.saved))


def _age(slot: Slot) -> tuple[float, int]:
    """A number that is larger for a draw that has begun later."""
    return slot.clock, slot.place
