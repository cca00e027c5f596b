"""The rank of this process among those that share a run, in a launch (`accelerate launch`, `torchrun`) or in a grid's jobs.

The processes have no process group and exchange no messages: they claim pending samples in the run folder (`store/folder.py`).
"""

import os
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

SHARD = "DFLASH_MCMC_SHARD"
"""Environment variable of a grid's job: `2/8` is the third of eight jobs that draw one run."""


class RankPlace(NamedTuple):
    """The index of a process, from 0, and the number of processes."""

    position: int
    total: int


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


def place() -> RankPlace:
    """The place among all known processes that draw this run. Each of them starts at its own part of the work."""
    index, _, count = os.environ.get(SHARD, "0/1").partition("/")
    return RankPlace(int(index) * world_size() + rank(), int(count) * world_size())


def own_part_first(items: Sequence[T]) -> Sequence[T]:
    """All items, rotated to start with this process's part: processes with different starts rarely compete for a sample."""
    position, total = place()
    start = len(items) * position // total
    return [*items[start:], *items[:start]]


def waits() -> bool:
    """Whether this process waits until the run is complete.

    The first process of a launch waits. The single process of a grid's job does not: other jobs may draw the same run.
    """
    return not rank() and (SHARD not in os.environ or world_size() > 1)
