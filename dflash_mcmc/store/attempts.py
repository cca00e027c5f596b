"""Attempts at tasks: finds a task that kills its process, and stops retrying it.

A process that is killed, for example because memory runs out, takes all of its tasks in progress with it, and one of them may
be the cause. A task that was in progress at two deaths is a suspect and is done alone. After `hardware.max_attempts` deaths
while it was done alone, it is recorded as failed. The graceful end of a task, at Ctrl-C or a time limit, is not a death.

A death with another cause looks the same. Such deaths seldom hit one task repeatedly. If they do, the only cost is that the
task is done alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import IO

from dflash_mcmc.errors import UserError
from dflash_mcmc.store.files import append_line, open_to_extend, read_regular
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.lines import Damaged, to_line, whole_lines
from dflash_mcmc.store.reading import attempt_of
from dflash_mcmc.store.records import SampleKey

_DEATHS_OF_A_SUSPECT = 2
"""Number of deaths that make a task a suspect."""


class Attempts:
    """The attempts at a run's tasks. Each process has a file of them (`attempts*.jsonl`) until the run is complete.

    Args:
        most: number of deaths with no other task in progress after which a task is not retried.
        in_progress: the clause of a message that describes the task at the time of a death.
    """

    def __init__(self, store: RunStore, most: int, in_progress: str = "this sample was being drawn"):
        self._store, self._most, self._in_progress = store, most, in_progress
        self._file: IO | None = None
        self._deaths: Counter[SampleKey] = Counter()
        self._alone: Counter[SampleKey] = Counter()
        """Deaths with no other task in progress."""
        self.reread()

    def reread(self) -> None:
        """Reads the files of all processes. A task that another process is doing now counts one death too many."""
        self._deaths.clear()
        self._alone.clear()
        for path in self._store.folder.glob("attempts*.jsonl"):
            lines, _ = whole_lines(read_regular(path) or b"")  # another process may just have completed the run
            last: dict[SampleKey, bool] = {}  # a process gives up only tasks that it has begun, in the same file
            for number, line in enumerate(lines, start=1):
                try:
                    problem, chain, begun, alone = attempt_of(line)
                except Damaged as error:
                    raise UserError(f"{path}: line {number}: {error}; repair=true moves damaged lines away") from error
                key, count = (problem, chain), 1 if begun else -1
                if begun:
                    last[key] = alone
                self._deaths[key] += count
                self._alone[key] += count * last.get(key, False)

    def suspects(self, keys: Iterable[SampleKey]) -> list[SampleKey]:
        """The keys of tasks that must be done alone. Those with most deaths alone come first."""
        return sorted(filter(self.is_suspect, keys), key=lambda key: -self._alone[key])

    def is_suspect(self, key: SampleKey) -> bool:
        """Whether the task must be done alone."""
        return self._deaths[key] >= _DEATHS_OF_A_SUSPECT

    def failure(self, key: SampleKey) -> str | None:
        """Why a claimed task must not be retried; None if it may be."""
        if self._alone[key] >= self._most:
            self.reread()  # another process may have given the task up since the last reading
        if self._alone[key] < self._most:
            return None
        return (f"the process died {self._deaths[key]} times while {self._in_progress}, {self._alone[key]} times with no "
                "other task in progress")

    def begin(self, key: SampleKey, alone: bool) -> None:
        """Writes that a claimed task is begun."""
        self._write(key, True, alone)

    def give_up(self, key: SampleKey) -> None:
        """Writes that a begun task was given up gracefully."""
        self._write(key, False, False)

    def _write(self, key: SampleKey, begun: bool, alone: bool) -> None:
        path = self._store.folder / self._store.file_name("attempts")
        if self._file is None:
            self._file = open_to_extend(path)
        append_line(path, self._file, to_line({"problem": key[0], "chain": key[1], "begun": begun, "alone": alone}))

    def close(self, complete: bool) -> None:
        """Removes the files if the run is complete, or if every attempt in them was given up gracefully.

        The files stay while another process has the run open: it may have more to do than this one.
        """
        if self._file is not None:
            self._file.close()
        if not complete:
            self.reread()
        if complete or not any(self._deaths.values()):
            self._store.remove_if_alone("attempts*.jsonl")
