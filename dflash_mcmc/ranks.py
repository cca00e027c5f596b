"""The processes of one launch (`accelerate launch`, `torchrun`) that share a run's work.

They need no process group: a store of counters, hosted by the launcher, hands out the work and says who is done. So a rank
that has nothing left to draw can wait for hours without a collective operation timing out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import cache

_POLL_SECONDS = 0.1


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


class Team:
    """The processes that share a run: counters with a name, shared by all of them.

    Args:
        name: of the run, and unique in the launch.
    """

    def __init__(self, name: str):
        # The launcher's counters outlive a restart of its processes.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.name, self.rank, self.size = f"{name}/{restart}", rank(), world_size()
        self._alone: dict[str, int] = {}

    def add(self, counter: str, amount: int) -> int:
        """Adds to a counter and returns its new value. Atomic."""
        if self.size == 1:
            self._alone[counter] = self._alone.get(counter, 0) + amount
            return self._alone[counter]
        return _store().add(f"dflash_mcmc/{self.name}/{counter}", amount)

    def take(self, total: int) -> Iterator[int]:
        """Numbers from 0 to total - 1; each goes to one process, when it asks for it."""
        while (number := self.add("taken", 1) - 1) < total:
            yield number

    def wait(self, counter: str, value: int) -> None:
        """Returns when the counter has reached the value. If a process fails, the launcher ends the others."""
        while self.add(counter, 0) < value:
            time.sleep(_POLL_SECONDS)


@cache
def _store():
    """The launch's store of counters."""
    import torch.distributed

    return next(iter(torch.distributed.rendezvous("env://")))[0]
