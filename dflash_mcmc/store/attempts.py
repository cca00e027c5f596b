"""The tasks that processes have begun, so that a start can name those that were never finished.

A process that is killed, for example because memory runs out, takes all of its tasks in progress with it, and one of them may
be the cause. The graceful end of a task, at Ctrl-C or a time limit, is no such end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import IO

from dflash_mcmc.errors import UserError
from dflash_mcmc.store.files import append_line, open_to_extend, read_regular
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.reading import Attempt, attempt_of
from dflash_mcmc.store.records import SampleKey
from dflash_mcmc.store.schema import Damaged, to_line, whole_lines

_SHOWN = 3


class Attempts:
    """The attempts at a run's tasks. Each process has a file of them (`attempts*.jsonl`) until the run is complete."""

    def __init__(self, store: RunStore):
        self._store = store
        self._file: IO | None = None

    def unfinished(self) -> Counter[SampleKey]:
        """How often each task was begun and not given up. One that another process is doing now is among them.

        Raises UserError for a damaged line.
        """
        counts: Counter[SampleKey] = Counter()
        for path in self._store.folder.glob("attempts*.jsonl"):
            for line_number, line in enumerate(whole_lines(read_regular(path) or b""), start=1):
                try:
                    attempt = attempt_of(line)
                except Damaged as error:
                    raise UserError(f"{path}: line {line_number}: {error}; repair=true moves damaged lines away") from error
                counts[attempt["problem"], attempt["chain"]] += 1 if attempt["begun"] else -1
        return counts

    def suspects(self, pending: Collection[SampleKey]) -> str | None:
        """A line about the tasks among these that were begun twice or more and never finished; None without any."""
        most = [(key, count) for key, count in self.unfinished().most_common() if count > 1 and key in pending]
        if not most:
            return None
        named = ", ".join(f"problem {problem}, chain {chain} ({count} times)" for (problem, chain), count in most[:_SHOWN])
        more = f" and {len(most) - _SHOWN} more" if len(most) > _SHOWN else ""
        return (f"begun and never finished: {named}{more}; if one of them kills its process, hardware.num_slots=1 shows "
                "which, and dataset.ids leaves it out")

    def begin(self, key: SampleKey) -> None:
        """Writes that a claimed task is begun."""
        self._write(key, True)

    def give_up(self, key: SampleKey) -> None:
        """Writes that a begun task was given up gracefully."""
        self._write(key, False)

    def _write(self, key: SampleKey, begun: bool) -> None:
        path = self._store.folder / self._store.file_name("attempts")
        self._file = self._file or open_to_extend(path)
        append_line(path, self._file, to_line(Attempt(problem=key[0], chain=key[1], begun=begun)))

    def close(self, complete: bool) -> None:
        """Removes the files if the run is complete, or if every attempt in them was given up gracefully.

        The files stay while another process has the run open: it may have more to do than this one.
        """
        if self._file is not None:
            self._file.close()
        if complete or not any(self.unfinished().values()):
            self._store.remove_if_alone("attempts*.jsonl")
