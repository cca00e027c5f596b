"""Where this process stands among those that draw together, in a launch (`accelerate launch`, `torchrun`) or a grid's jobs.

They need no process group and no word with each other: what is pending is claimed in the run's folder (`store.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

SHARD = "DFLASH_MCMC_SHARD"
"""Environment variable of a grid's job: `2/8` is the third of eight that draw one run."""


class RankPlace(NamedTuple):
    """One of so many processes, from 0."""

    index: int
    count: int


def rank() -> int:
    """Number of this process in the launch; 0 outside one."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Processes of the launch; 1 outside one."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """Number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """Processes of the launch on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def in_shard() -> bool:
    """Whether other jobs draw the same run, as far as is known."""
    return SHARD in os.environ


def place() -> RankPlace:
    """Among all processes that draw this run, as far as they know of each other: each begins at its own part of the work."""
    index, _, count = os.environ.get(SHARD, "0/1").partition("/")
    return RankPlace(int(index) * world_size() + rank(), int(count) * world_size())


def own_part_first(items: Sequence[T]) -> Sequence[T]:
    """All of them, from this process's part on: processes that begin apart seldom meet."""
    index, count = place()
    start = len(items) * index // count
    return [*items[start:], *items[:start]]


def waits() -> bool:
    """Whether this process stays until the run is complete: the first of a launch, but no job that others can do without."""
    return not rank() and (not in_shard() or world_size() > 1)
