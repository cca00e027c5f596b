"""Attempts at tasks: finds a task that kills its process, and stops retrying it.

A process that is killed, for example because memory runs out, takes all of its tasks in progress with it, and one of them may
be the cause. A task that was in progress at two deaths is a suspect and is done alone. After `hardware.max_attempts` deaths
while it was done alone, it is recorded as failed. The graceful end of a task, at Ctrl-C or a time limit, is not a death.

A death with another cause looks the same. A device that fails kills every task. Deaths alone on a single device are therefore
not enough: the task must also have died on a second device, or the device must have done a recorded task again
(`DeviceCheck`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import IO

from dflash_mcmc.errors import UserError
from dflash_mcmc.store.files import append_line, open_to_extend, read_regular
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.reading import Attempt, attempt_of
from dflash_mcmc.store.records import SampleKey
from dflash_mcmc.store.schema import Damaged, to_line, whole_lines

_DEATHS_OF_A_SUSPECT = 2
"""Number of deaths that make a task a suspect."""


class Attempts:
    """The attempts at a run's tasks. Each process has a file of them (`attempts*.jsonl`) until the run is complete.

    Args:
        most: number of deaths with no other task in progress after which a task is not retried.
        in_progress: the clause of a message that describes the task at the time of a death.

    Attributes:
        device: the device of this process, which is noted with each attempt; empty if it is not known.
    """

    def __init__(self, store: RunStore, most: int, in_progress: str = "this sample was being drawn"):
        self._store, self._most, self._in_progress = store, most, in_progress
        self.device = ""
        self._file: IO | None = None
        self._deaths: Counter[SampleKey] = Counter()
        self._alone: defaultdict[SampleKey, Counter[str]] = defaultdict(Counter)
        """Deaths with no other task in progress, by device."""
        self._checks: Counter[str] = Counter()
        """Deaths by device while a recorded task was done again."""
        self.reread()

    def reread(self) -> None:
        """Reads the files of all processes. A task that another process is doing now counts one death too many."""
        self._deaths.clear()
        self._alone.clear()
        self._checks.clear()
        for path in self._store.folder.glob("attempts*.jsonl"):
            lines = whole_lines(read_regular(path) or b"")  # another process may just have completed the run
            last: dict[SampleKey, Attempt] = {}  # a process gives up only tasks that it has begun, in the same file
            for line_number, line in enumerate(lines, start=1):
                try:
                    attempt = attempt_of(line)
                except Damaged as error:
                    raise UserError(f"{path}: line {line_number}: {error}; repair=true moves damaged lines away") from error
                key, change = (attempt["problem"], attempt["chain"]), 1 if attempt["begun"] else -1
                if attempt["begun"]:
                    last[key] = attempt
                if begun := last.get(key):
                    self._count(key, begun, change)

    def _count(self, key: SampleKey, begun: Attempt, change: int) -> None:
        device = begun.get("device", "")
        if begun.get("check", False):
            self._checks[device] += change
            return
        self._deaths[key] += change
        if begun["alone"]:
            self._alone[key][device] += change

    def suspects(self, keys: Iterable[SampleKey]) -> list[SampleKey]:
        """The keys of tasks that must be done alone.

        Those with most deaths alone come first, and those that wait for a check of the device last.
        """
        return sorted(filter(self.is_suspect, keys), key=lambda key: (self.blames_device(key), -self._alone[key].total()))

    def is_suspect(self, key: SampleKey) -> bool:
        """Whether the task must be done alone."""
        return self._deaths[key] >= _DEATHS_OF_A_SUSPECT

    def failure(self, key: SampleKey) -> str | None:
        """Why a claimed task must not be retried; None if it may be."""
        if self._alone[key].total() >= self._most:
            self.reread()  # another process may have given the task up since the last reading
        if self._alone[key].total() < self._most or self._is_new_to(key):
            return None
        return (f"the process died {self._deaths[key]} times while {self._in_progress}, {self._alone[key].total()} times with "
                "no other task in progress")

    def blames_device(self, key: SampleKey) -> bool:
        """Whether the task has died alone too often, and only on the device of this process."""
        return self._alone[key].total() >= self._most and len(self._places(key)) < 2 and not self._is_new_to(key)

    def failed_checks(self) -> int:
        """Number of processes that died on this device while they did a recorded task again."""
        return self._checks[self.device]

    def _places(self, key: SampleKey) -> set[str]:
        """The known devices on which the task has died alone."""
        return {device for device, count in self._alone[key].items() if count > 0 and device}

    def _is_new_to(self, key: SampleKey) -> bool:
        """Whether the task has died alone on one device, and not on that of this process."""
        places = self._places(key)
        return bool(self.device) and len(places) == 1 and self.device not in places

    def begin(self, key: SampleKey, alone: bool, check: bool = False) -> None:
        """Writes that a claimed task is begun.

        Args:
            check: the task is recorded, and is done again to check the device.
        """
        self._write(key, True, alone, check)

    def give_up(self, key: SampleKey) -> None:
        """Writes that a begun task was given up gracefully, or that a check is over."""
        self._write(key, False, False, False)

    def _write(self, key: SampleKey, begun: bool, alone: bool, check: bool) -> None:
        path = self._store.folder / self._store.file_name("attempts")
        if self._file is None:
            self._file = open_to_extend(path)
        attempt: Attempt = {"problem": key[0], "chain": key[1], "begun": begun, "alone": alone}
        if begun and self.device:
            attempt["device"] = self.device
        if check:
            attempt["check"] = True
        append_line(path, self._file, to_line(attempt))

    def close(self, complete: bool) -> None:
        """Removes the files if the run is complete, or if every attempt in them was given up gracefully.

        The files stay while another process has the run open: it may have more to do than this one.
        """
        if self._file is not None:
            self._file.close()
        if not complete:
            self.reread()
        if complete or not (any(self._deaths.values()) or any(self._checks.values())):
            self._store.remove_if_alone("attempts*.jsonl")
