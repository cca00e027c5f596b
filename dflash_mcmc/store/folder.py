"""A run's folder: append-only records that survive any end of the process. Store failure always stops a run.

    config.yaml     the configuration, resolved, of the last start
    run.json        identity, and for each start: time, command, commit, versions, device
    records.jsonl   one line a sample, written when it is graded; records.1.jsonl, ... by processes that draw at the same time
    summary.json    from the records alone
    lock            what the processes that share the run lock parts of

A record is one line, and a line counts only with its line feed: what a killed process left behind it is not read, and is cut
off when the file is written to again; that sample is drawn anew, with the same randomness.

Any number of processes, on any number of machines, draw one run together: each locks a sample before it begins it, and writes
to a file of its own. A lock is let go of behind the record, which is then on the disk, so whoever gets the lock finds it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dflash_mcmc.errors import RunBusy, UserError, writing
from dflash_mcmc.store.files import append_line, cut_torn_line, write_atomically
from dflash_mcmc.store.locks import Locks
from dflash_mcmc.store.records import SampleKey, parse, record_files, records_file, tell_repeated

_SYNC_SECONDS = 1.0
_MOST_TRIES = 100
"""To make a folder: there are places where none can be made, and the reason given is that it is not there."""
_MUTEX, _LEAD, _SUMMARY, _WRITERS, _SAMPLES = 0, 1, 2, 3, 4096
"""First bytes of what is locked: changes of the folder, the tracker, what is written of all records, record files by number,
samples by hash."""
_LOOK_SECONDS = 0.1


class RunStore:
    """An open run folder. `records` holds what is recorded, by other processes too, in the order in which it was seen."""

    def __init__(self, folder: Path, locks: Locks, left_out: Sequence[str] = ()):
        self.folder = folder
        self.records: list[dict] = []
        self.places: list[tuple[int, int]] = []
        """Of each record: number of its file, and of its line, from 0."""
        self._locks, self._keys, self._claimed, self._unsynced = locks, {}, set(), []
        self._left_out = frozenset(left_out)
        self._read: dict[int, tuple[int, int]] = {}
        self._synced, self._session, self._leads = time.monotonic(), 0, False

    @classmethod
    @contextmanager
    def open(cls, folder: Path, left_out: Sequence[str] = ()) -> Iterator[RunStore]:
        """Makes the folder where needed, reads its records. Raises UserError for a corrupt file or a folder without locks.

        Args:
            left_out: fields that are in the files and not in `records`: tokens of many samples are large.
        """
        store = cls(folder, _locks_of(folder), left_out)
        try:
            store._enter()
            yield store
        finally:
            store._leave()

    def _enter(self) -> None:
        self._number = next((number for number in range(_SAMPLES - _WRITERS) if self._locks.take(_WRITERS + number)), None)
        if self._number is None:
            raise RunBusy(f"{self.folder}: {_SAMPLES - _WRITERS} processes draw this run already")
        if self._is_alone():
            for left in self.folder.glob(".*.tmp"):  # a file that a killed process was replacing
                left.unlink()
        path = self.folder / self.file_name()
        with writing(path):
            if path.exists():
                cut_torn_line(path)
            self._file = path.open("ab", buffering=0)
        # So that others know whom to look for, without listing the folder, which network file systems are slow to renew.
        # A listing can be of some time ago, so the number never falls.
        count = max(record_files(self.folder), default=0) + 1
        if count > self._locks.number():
            self._locks.set_number(count)
        self._locks.free(_MUTEX)
        self.refresh()

    def file_name(self, stem: str = "records") -> str:
        """Of a file that this process alone writes to."""
        return records_file(self._number, stem)

    def _leave(self) -> None:
        try:
            if hasattr(self, "_file"):
                self.sync()
                self._file.close()
                self._locks.take(_MUTEX, wait=True)
                if self._is_alone() and not self.is_described() and _is_empty(self.folder):
                    _remove(self.folder)
        finally:
            self._locks.close()

    def _is_alone(self) -> bool:
        """Whether no other process has the folder open. With the mutex held, so that none comes meanwhile."""
        alone = self._locks.take(_WRITERS, _SAMPLES - _WRITERS)
        if alone:  # which has locked all of them
            self._locks.free(_WRITERS, self._number)
            self._locks.free(_WRITERS + self._number + 1, _SAMPLES - _WRITERS - self._number - 1)
        return alone

    def lead(self, seconds: float = 0.0) -> bool:
        """Whether this process is the one that tells the tracker: it becomes it where there is none.

        Waits so many seconds for another to leave, and no longer: that one may draw far more than was asked of this.
        """
        until = time.monotonic() + seconds
        while not self._leads:
            self._leads = self._locks.take(_LEAD)
            if self._leads or time.monotonic() >= until:
                break
            time.sleep(_LOOK_SECONDS)
        return self._leads

    @contextmanager
    def summarising(self) -> Iterator[None]:
        """Held while what follows from all records is written: of those that are complete the last has seen them all."""
        try:
            self._locks.take(_SUMMARY, wait=True)
            self.look_again()
            yield
        finally:
            self._locks.free(_SUMMARY)

    def refresh(self) -> None:
        """Takes in what other processes have recorded since."""
        for number in range(self._locks.number()):
            path = self.folder / records_file(number)
            line, offset = self._read.get(number, (0, 0))
            try:  # opened anew: only then does a network file system look for what is new
                with path.open("rb") as file:
                    file.seek(offset)
                    content = file.read()
            except FileNotFoundError:
                continue
            records, length = parse(path, content, line)
            for record in records:
                self._add(record, number, line)
                line += 1
            self._read[number] = line, offset + length

    def look_again(self) -> None:
        """The same, surely: a network file system looks for what is new where a lock is taken."""
        with self.mutex():
            self.refresh()

    def _add(self, record: dict, number: int, line: int) -> None:
        key, place = (record["problem"], record["chain"]), f"{self.folder / records_file(number)}: line {line + 1}"
        if key in self._keys:
            tell_repeated(key, place, self._keys[key])
            return
        self._keys[key] = place
        self.records.append({name: value for name, value in record.items() if name not in self._left_out})
        self.places.append((number, line))

    def recorded(self) -> set[SampleKey]:
        """(problem id, chain) of every record."""
        return set(self._keys)

    def in_order(self, keys: Iterable[SampleKey]) -> list[dict]:
        """The records in the order of these keys, however they were come by; those with other keys stand behind."""
        place = {key: number for number, key in enumerate(keys)}
        keyed = [((record["problem"], record["chain"]), record) for record in self.records]
        return [record for key, record in sorted(keyed, key=lambda pair: (place.get(pair[0], len(place)), pair[0]))]

    def take(self, keys: Iterable[SampleKey]) -> Iterator[SampleKey]:
        """Those that are not recorded and that no other process draws; each is claimed when it is asked for."""
        for key in keys:
            if self.claim(key):
                yield key

    def claim(self, key: SampleKey) -> bool:
        """Keeps others from drawing a sample until it is recorded. False where it is recorded or being drawn."""
        if key in self._keys or key in self._claimed or not self._locks.take(_byte(key)):
            return False
        self.refresh()  # it can have been recorded since the last look
        if key in self._keys:
            self._locks.free(_byte(key))
            return False
        self._claimed.add(key)
        return True

    def append(self, record: dict) -> None:
        """Writes one line in one call. After it returns, killing the process cannot lose it.

        Raises ValueError for a sample that is recorded or that another process draws, UserError where it cannot be written.
        """
        key = record["problem"], record["chain"]
        line = json.dumps(record, ensure_ascii=True, allow_nan=False).encode() + b"\n"
        if key not in self._claimed and not self.claim(key):
            raise ValueError(f"problem {key[0]}, chain {key[1]} is recorded already, or being drawn by another process")
        number, offset = self._read.get(self._number, (0, 0))
        append_line(self.folder / self.file_name(), self._file, line)
        self._add(record, self._number, number)
        self._read[self._number] = number + 1, offset + len(line)
        self._claimed.discard(key)
        self._unsynced.append(key)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """The records onto the disk, against a failing machine; only then may others come to look for them."""
        with writing(self.folder / self.file_name()):
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()
        for key in self._unsynced:
            self._locks.free(_byte(key))
        self._unsynced = []

    def is_described(self) -> bool:
        """Whether a process has written what the run is."""
        return (self.folder / "run.json").is_file()

    def write_config(self, text: str) -> None:
        with self.mutex():
            write_atomically(self.folder / "config.yaml", text)

    def write_session(self, identity: dict, session: dict) -> None:
        """Adds a start of the run to run.json."""
        path = self.folder / "run.json"
        with self.mutex():
            sessions = json.loads(path.read_text())["sessions"] if path.is_file() else []
            self._session = len(sessions)
            write_atomically(path, json.dumps({"identity": identity, "sessions": [*sessions, session]}, indent=1) + "\n")

    def add_to_session(self, values: dict) -> None:
        """Adds to this start of run.json."""
        path = self.folder / "run.json"
        with self.mutex():
            content = json.loads(path.read_text())
            content["sessions"][self._session].update(values)
            write_atomically(path, json.dumps(content, indent=1) + "\n")

    def write_summary(self, summary: dict) -> None:
        with self.mutex():
            write_atomically(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")

    @contextmanager
    def mutex(self) -> Iterator[None]:
        """Held while a file is replaced: no other process does so meanwhile, or takes the new file for a dead one's."""
        try:
            self._locks.take(_MUTEX, wait=True)
            yield
        finally:
            self._locks.free(_MUTEX)

    def is_alone(self) -> bool:
        """Whether no other process has the folder open now."""
        with self.mutex():
            return self._is_alone()


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Keeps all processes from opening a run's folder. Raises RunBusy where one has it open."""
    locks = _locks_of(folder)
    try:
        if not locks.take(_WRITERS, _SAMPLES - _WRITERS):
            raise RunBusy(f"{folder}: this run is being written by another process; wait for it or stop it")
        yield
    finally:
        locks.close()


def _locks_of(folder: Path) -> Locks:
    """The folder's locks, with the mutex held."""
    tries = 0
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            locks = Locks(folder / "lock")
        except OSError as error:
            tries += 1
            if isinstance(error, FileNotFoundError) and tries < _MOST_TRIES:  # another process has just removed the folder
                continue
            raise UserError(f"paths.outputs: cannot write to {folder}: {error.strerror}") from error
        try:
            locks.take(_MUTEX, wait=True)
        except BaseException:
            locks.close()
            raise
        if locks.is_there():
            return locks
        locks.close()


def _byte(key: SampleKey) -> int:
    """Where a sample is locked: 62 bits of a hash, so that nobody has to agree on numbers."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return _SAMPLES + (int.from_bytes(digest) >> 2)


def _remove(folder: Path) -> None:
    """A folder of which nothing came: the run was refused before anything was drawn."""
    for path in (*record_files(folder).values(), folder / "config.yaml", folder / "lock"):
        path.unlink(missing_ok=True)
    for empty in (folder, folder.parent):
        try:
            empty.rmdir()
        except OSError:  # something else is in it
            return


def _is_empty(folder: Path) -> bool:
    return not any(path.stat().st_size for path in record_files(folder).values())


