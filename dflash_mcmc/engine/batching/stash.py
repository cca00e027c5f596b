"""Keys and values of slots without a row. They are in the host's memory, and their former rows serve other operations.

A slot that gets a row again continues with the same bits as if it had kept its row.
"""

from __future__ import annotations

from typing import NamedTuple

from dflash_mcmc.engine.batching.cache import SlotCache


class Stash(NamedTuple):
    """A cache of one row and, if the engine has spare rows, one for its spare row."""

    cache: SlotCache
    spare: SlotCache | None


class Home(NamedTuple):
    """Where a slot's keys and values are: a row of a cache, and the same row of the cache of spare rows."""

    cache: SlotCache
    spare: SlotCache | None
    row: int
