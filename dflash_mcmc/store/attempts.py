"""Samples that were under way when a process died: the one that kills it is found, and passed over.

A process that is killed (out of memory, say) takes all of its samples with it, and one of them may be why. Each that was
there twice is drawn by itself from then on; if the process dies over it again and again, it is recorded as an error. What is
given up in good order, at Ctrl-C or a time limit, does not count. A process that is killed for other reasons costs its samples
only some company: nothing tells such a death from one that is the sample's doing, but it seldom meets one sample each time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import IO

from dflash_mcmc.errors import writing
from dflash_mcmc.store.files import append_line
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.records import SampleKey

_DEATHS_IN_COMPANY = 2
"""From which on a sample is drawn by itself."""


class Attempts:
    """The attempts at a run's samples, in a file for each process that draws (`attempts*.jsonl`) until the run is complete.

    Args:
        most: deaths of a process over a sample with nothing else under way that make it an error.
    """

    def __init__(self, store: RunStore, most: int):
        self._store, self._most = store, most
        self._file: IO | None = None
        self._deaths: Counter[SampleKey] = Counter()
        self._alone: Counter[SampleKey] = Counter()
        """Those with nothing else under way."""
        self.reread()

    def reread(self) -> None:
        """Takes in what other processes have written. Of a sample that one of them draws now it says one death too many."""
        self._deaths.clear()
        self._alone.clear()
        for path in self._store.folder.glob("attempts*.jsonl"):
            try:
                content = path.read_bytes()
            except FileNotFoundError:  # another process has just completed the run
                continue
            last: dict[SampleKey, bool] = {}  # who gives a sample up has begun it in the same file
            for line in content.split(b"\n")[:-1]:  # the last one is torn, or empty
                problem, chain, begun, alone = json.loads(line)
                key, count = (problem, chain), 1 if begun else -1
                if begun:
                    last[key] = alone
                self._deaths[key] += count
                self._alone[key] += count * last.get(key, False)

    def suspects(self, keys: Iterable[SampleKey]) -> list[SampleKey]:
        """Those that are to be drawn by themselves, first the one that has been longest."""
        return sorted(filter(self.is_suspect, keys), key=lambda key: -self._alone[key])

    def is_suspect(self, key: SampleKey) -> bool:
        """Whether it is to be drawn by itself."""
        return self._deaths[key] >= _DEATHS_IN_COMPANY

    def failure(self, key: SampleKey) -> str | None:
        """Why a claimed sample is not to be drawn again, if so."""
        if self._alone[key] >= self._most:
            self.reread()  # of one that another process drew at the last look and gave up since, that said too much
        if self._alone[key] < self._most:
            return None
        return (f"the process died {self._deaths[key]} times while this sample was being drawn, {self._alone[key]} times with "
                "no other under way")

    def begin(self, key: SampleKey, alone: bool) -> None:
        """Notes that a claimed sample is begun."""
        self._write([*key, True, alone])

    def give_up(self, key: SampleKey) -> None:
        """Notes that it was left in good order."""
        self._write([*key, False, False])

    def _write(self, line: list) -> None:
        path = self._store.folder / self._store.file_name("attempts")
        with writing(path):
            if self._file is None:
                self._file = path.open("ab", buffering=0)
                content = path.read_bytes()
                if not content.endswith(b"\n"):  # what a death left of a line
                    self._file.truncate(content.rfind(b"\n") + 1)
        append_line(path, self._file, json.dumps(line).encode() + b"\n")

    def close(self, complete: bool) -> None:
        """With `complete` the files go: nothing is left to be drawn."""
        if self._file is not None:
            self._file.close()
        if complete and self._store.is_alone():  # others may draw more of the run than this one was asked for
            for path in self._store.folder.glob("attempts*.jsonl"):
                path.unlink(missing_ok=True)
