"""A run's folder: append-only records that survive any end of the process. A failure to write always stops the run.

    config.yaml     the resolved configuration of the last start
    run.json        identity, and for each start: time, command, commit, versions, device
    records.jsonl   one line per task, written when it is done; records.1.jsonl, ... by processes that run at the same time
    records.damaged.jsonl  lines that `repair=true` has taken out
    problems.jsonl  question and prompt of each problem
    tracked.json    what each tracker has received
    attempts.jsonl  tasks begun and given up, while the run is incomplete; attempts.1.jsonl, ... by other processes
    summary.json    a function of the records only
    lock            the file in which the processes of the run lock byte ranges

A record is one line, and a line counts only if it ends with a line feed. A part of a line that a killed process has
left at the end of a file is not read, and is removed before the file is written to again. So are blocks of zeros after a power
loss. Its task is repeated with the same randomness. Any other line that does not fit its checksum or its schema ends the run
with an error, unless the run may repair.

Any number of processes, on any number of machines, can share a run. Each process locks a task before it begins the task, and
writes to its own file of records. It releases the lock after the record is on the disk, so the next process that gets the lock
finds the record. A task is a sample or a unit of a probe.

The locks are on bytes of one file, for the processes of one machine, or of many machines that share a folder. They are POSIX
record locks (fcntl). The kernel or the file server releases them when a process ends, for whatever reason, so there are no
clocks, no leases and no stale lock files. They work on local file systems, NFS 4 (and NFS 3 with its lock daemon), Lustre
mounted with `flock`, CephFS, GPFS, and BeeGFS with `tuneUseGlobalFileLocks`. On Lustre mounted with `localflock` each node has
its own locks, and two nodes would draw the same sample.

A lock belongs to the process, not to the object. Two parts of one process do not exclude each other, and closing the file
anywhere in the process releases all its locks. `Locks` therefore opens a file only once in a process.

`FolderLocks` are those of a run folder: each byte of its lock file guards what only one process may do at a time.
"""

import errno
import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import IO

from dflash_mcmc.errors import RunBusy, UserError, note, writing
from dflash_mcmc.store import files, records
from dflash_mcmc.store.files import Damaged, Schema, to_line
from dflash_mcmc.store.records import ATTEMPTS, CONFIG, NUM_FILES, RUN, Attempt, SampleKey, described, key_of, unit_schema

_DIGITS = 8
_MOST_SECONDS, _TOLD_SECONDS = 600.0, 10.0
"""Longest wait for a lock, and the wait after which a line says what for. Locks that are waited for are held for moments, or
for the time that a summary with its figures takes."""
_LEAST_PAUSE, _MOST_PAUSE = 0.001, 0.1
_open: set[Path] = set()


class Locks:
    """The locks of a file. Their byte offsets may lie after its end.

    Raises RunBusy if this process has the file open, UserError if the path is not that of a regular file.
    """

    def __init__(self, path: Path):
        files.refuse_link(path)
        files.is_there(path)
        self._path = path.resolve()
        if self._path in _open:
            raise RunBusy(f"{path.parent}: this process has that run open already")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        _open.add(self._path)

    def close(self) -> None:
        """Releases all locks."""
        _open.discard(self._path)
        os.close(self._file)

    def exists(self) -> bool:
        """Whether the path still leads to this file. Another process can have removed it."""
        try:
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:  # it does not exist, or a file server has removed its folder
            return False

    def take(self, first: int, length: int = 1, wait: bool = False) -> bool:
        """Locks bytes. Returns False if another process has locked any of them. Raises UserError.

        Args:
            wait: whether to wait until no other process has them locked. The wait has a bound, because the other process may
                be stopped or hang. Raises RunBusy after it.
        """
        started, pause, shown = time.monotonic(), _LEAST_PAUSE, False
        while not self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, first, length):
            waited = time.monotonic() - started
            if not wait:
                return False
            if waited > _MOST_SECONDS:
                raise RunBusy(f"{self._path}: another process has been changing files of this folder for {_MOST_SECONDS:.0f} "
                              "seconds; continue or end that process, and run the same command again; nothing recorded is "
                              "lost")
            if waited > _TOLD_SECONDS and not shown:
                shown = True
                note(f"{self._path}: waiting, for at most {_MOST_SECONDS:.0f} seconds, until another process has changed "
                     "files of this folder")
            time.sleep(pause)
            pause = min(2.0 * pause, _MOST_PAUSE)
        return True

    def free(self, first: int, length: int = 1) -> None:
        """Releases bytes, whether or not they are locked. Raises UserError."""
        if length:  # for fcntl a length of 0 means all bytes that follow
            self._lock(fcntl.LOCK_UN, first, length)

    @contextmanager
    def held(self, first: int) -> Iterator[None]:
        """Waits for a byte, and holds it."""
        try:
            self.take(first, wait=True)
            yield
        finally:
            self.free(first)

    def _lock(self, operation: int, first: int, length: int) -> bool:
        """Locks or unlocks bytes. False if another process has locked any of them. Raises UserError."""
        try:
            fcntl.lockf(self._file, operation, length, first)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN) and operation != fcntl.LOCK_UN:
                return False
            what = "unlock" if operation == fcntl.LOCK_UN else "lock"
            raise UserError(f"paths.outputs: cannot {what} {self._path}: {error.strerror}; allowed: a file system with POSIX "
                            "record locks, such as a local one, NFS 4, or Lustre mounted with flock") from error
        return True


_MOST_TRIES = 100
"""Number of tries to make a folder. Some file systems report "does not exist" for a folder that can never be made."""
MUTEX, SUMMARY, _LEAD, _WRITERS = 0, 2, 1, 3
_TASKS = _WRITERS + NUM_FILES
"""First bytes of the locked ranges. They are for changes of the folder, for files that are written from all records, for the
tracker, for record files by number, and for tasks by hash."""
_LOOK_SECONDS = 0.1


class FolderLocks(Locks):
    """The locks of a run folder. The constructor makes the folder and takes `MUTEX`, which the caller frees after `enter`.

    Raises UserError if the folder cannot be made or its file system has no locks, RunBusy if this process has it open.
    """

    def __init__(self, folder: Path):
        self.made = [each for each in (folder, *folder.parents) if not each.exists()]
        """The folders that were not there, the innermost first."""
        self._number, self._leads, tries = 0, False, 0
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                super().__init__(folder / "lock")
            except OSError as error:
                tries += 1
                if isinstance(error, FileNotFoundError) and tries < _MOST_TRIES:  # another process has just removed the folder
                    continue
                raise UserError(f"paths.outputs: cannot write to {folder}: {error.strerror}") from error
            try:
                self.take(MUTEX, wait=True)
            except BaseException:
                self.close()
                raise
            # Another process can have removed the folder before the lock was taken: nobody else would see these locks.
            if self.exists():
                return
            self.close()

    def enter(self) -> int:
        """Takes the number of a file of records that no other process writes to. Raises RunBusy."""
        for file_number in range(NUM_FILES):
            if self.take(_WRITERS + file_number):
                self._number = file_number
                return file_number
        raise RunBusy(f"{self._path.parent}: {NUM_FILES} processes draw this run already")

    def exclude_all(self) -> bool:
        """Keeps all processes from entering. Returns False if one has entered."""
        return self.take(_WRITERS, NUM_FILES)

    def is_alone(self) -> bool:
        """Whether no other process has entered. `MUTEX` must be held, so that no process enters meanwhile."""
        alone = self.exclude_all()
        if alone:  # the call has locked the numbers of all processes
            self.free(_WRITERS, self._number)
            self.free(_WRITERS + self._number + 1, NUM_FILES - self._number - 1)
        return alone

    def lead(self, seconds: float) -> bool:
        """Whether this process logs to the tracker. It takes the role if it is or becomes free within `seconds`."""
        until = time.monotonic() + seconds
        while not self._leads:
            self._leads = self.take(_LEAD)
            if self._leads or time.monotonic() >= until:
                break
            time.sleep(_LOOK_SECONDS)
        return self._leads

    def num_files(self) -> int:
        """The number of files of records; 0 in a new file, and one of zeros that a power loss has left.

        After a lock is taken, it comes from the file server and not from a cache. Raises UserError for any other content.
        """
        content = os.pread(self._file, _DIGITS + 1, 0).rstrip(b"\0")
        if content and (not content.isdigit() or len(content) > _DIGITS or int(content) > NUM_FILES):
            raise UserError(f"{self._path}: given {content!r}; allowed: a number up to {NUM_FILES}; delete the file while no "
                            "process draws the run")
        return int(content or 0)

    def raise_num_files(self, count: int) -> None:
        """Raises the number of files to `count`. `MUTEX` must be held. The number never decreases. Raises UserError.

        The number shows other processes which files exist. A network file system may list a new file late.
        """
        if count > self.num_files():
            with writing(self._path):
                os.pwrite(self._file, b"%0*d" % (_DIGITS, count), 0)  # in one write, so no reader sees a part of it
                os.fsync(self._file)


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Keeps all processes from opening a run's folder. Raises RunBusy if one has it open."""
    with closing(FolderLocks(folder)) as locks:
        if not locks.exclude_all():
            raise RunBusy(f"{folder}: this run is being written by another process; wait for it or stop it")
        yield


def task_byte(key: SampleKey) -> int:
    """The byte that locks a task. It is a hash of 62 bits, so processes need no common numbering of the tasks."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return _TASKS + (int.from_bytes(digest) >> 2)


_SYNC_SECONDS = 1.0


class RunStore:
    """An open run folder. `records` holds the records of all processes in the order in which this process has read them."""

    def __init__(self, folder: Path, locks: FolderLocks, file_number: int, not_in_memory: Sequence[str], schema: Schema):
        self.folder, self._schema = folder, schema
        self.records: list[dict] = []
        self.places: list[tuple[int, int]] = []
        """The file number and the line number of each record, both from 0."""
        self._locks, self._file_number = locks, file_number
        self._keys: dict[SampleKey, tuple[int, int]] = {}
        """The file number and the line number of each task's record."""
        self._claimed: set[SampleKey] = set()
        self._unsynced: list[SampleKey] = []
        self._not_in_memory = frozenset(not_in_memory)
        self._read: dict[int, tuple[int, int]] = {}
        """The lines and the bytes of each file that are read."""
        self._synced, self._session = time.monotonic(), 0
        self._file = files.open_to_extend(folder / self.file_name())

    @classmethod
    @contextmanager
    def open(cls, folder: Path, not_in_memory: Sequence[str] = (), schema: Schema | None = None,
             repair: bool = False, digest: str | None = None) -> "Iterator[RunStore]":
        """Creates the folder if needed and reads its records. Raises UserError for a damaged file or a folder without locks.

        Args:
            not_in_memory: large fields that are not kept in `records`.
            schema: of the records; None for that of any probe.
            repair: whether to move damaged lines to `records.damaged.jsonl`, so that their tasks are done again. Only a
                process that is alone in the folder does so.
            digest: the hash of the run's identity. Each record has it, and records of another run are refused.
        """
        of_run = (schema or unit_schema()).of_run(digest)
        with closing(FolderLocks(folder)) as locks:
            file_number = locks.enter()
            for path in (*records.record_files(folder, others=True).values(), *folder.glob("attempts*.jsonl")):
                files.refuse_link(path)  # before anything is cut
            if locks.is_alone():
                for left in folder.glob(".*.tmp"):  # a killed process was replacing a file
                    with writing(left):
                        left.unlink()
                if repair:
                    records.move_damaged(folder, of_run)
            elif repair:
                note(f"{folder}: repair=true has no effect while another process has this run open")
            store = cls(folder, locks, file_number, not_in_memory, of_run)
            try:
                # Before the lock is free, so that no process which enters later misses this file.
                locks.raise_num_files(max(records.record_files(folder), default=0) + 1)
                locks.free(MUTEX)
                store.refresh()
                yield store
            finally:
                store.sync()
                store._file.close()
                locks.take(MUTEX, wait=True)
                own_files = records.record_files(folder).values()
                # An attempt without a record can be a death.
                is_empty = not any(path.lstat().st_size for path in (*own_files, *folder.glob("attempts*.jsonl")))
                # A run that was refused after its folder was made leaves nothing behind. The lock goes last: a process that
                # opens the folder meanwhile waits, and makes it anew.
                if not store.is_described() and is_empty and locks.is_alone():
                    for path in (*own_files, folder / CONFIG, folder / "lock"):
                        path.unlink(missing_ok=True)
                    files.remove_empty(dict.fromkeys([folder, folder.parent, *locks.made]))

    def is_alone(self) -> bool:
        """Whether no other process has the folder open. The mutex must be held."""
        return self._locks.is_alone()

    def file_name(self, stem: str = "records") -> str:
        """The name of a file that only this process writes to."""
        return records.records_file(self._file_number, stem)

    def lead(self, seconds: float = 0.0) -> bool:
        """Whether this process logs to the tracker. It takes the role if no other process has it.

        Args:
            seconds: longest time to wait for the leading process to leave. That process may have much more work left than
                this one.
        """
        return self._locks.lead(seconds)

    @contextmanager
    def summarising(self) -> Iterator[None]:
        """A lock to hold while files are written from all records. The last process that gets it has read all of them."""
        with self._locks.held(SUMMARY):
            self.look_again()
            yield

    def refresh(self) -> None:
        """Reads what other processes have recorded since the last call."""
        for file_number in range(self._locks.num_files()):
            if file_number == self._file_number and file_number in self._read:  # nobody else writes to this process's own file
                continue
            num_lines, _ = self._read.setdefault(file_number, (0, 0))
            lines = self._new_lines(file_number)
            for line, record in records.records_of(self._path(file_number), lines, num_lines, self._schema):
                self._add(record, file_number, line)

    def _new_lines(self, file_number: int) -> Iterator[bytes]:
        """Yields the lines of a file that are not read yet, and counts each as read when the next one is asked for.

        A network file system looks for new content only when a file is opened.
        """
        num_lines, offset = self._read[file_number]
        for line in files.each_line(self._path(file_number), offset):
            yield line
            num_lines, offset = num_lines + 1, offset + len(line) + 1
            self._read[file_number] = num_lines, offset

    def _path(self, file_number: int) -> Path:
        return self.folder / records.records_file(file_number)

    def look_again(self) -> None:
        """Like `refresh`, but sees every record: a network file system looks for new content when a lock is taken."""
        with self.mutex():
            self.refresh()

    def _add(self, record: Mapping[str, object], file_number: int, line: int) -> None:
        key = key_of(record)
        if key in self._keys:
            repeat, first = (f"{self._path(file)}: line {at + 1}" for file, at in ((file_number, line), self._keys[key]))
            records.note_repeated(key, repeat, first)
            return
        self._keys[key] = file_number, line
        self.records.append({name: value for name, value in record.items() if name not in self._not_in_memory})
        self.places.append((file_number, line))

    def recorded(self) -> set[SampleKey]:
        """The key of every record."""
        return set(self._keys)

    def in_order(self, keys: Iterable[SampleKey]) -> list[dict]:
        """The records sorted by `keys`. Records with other keys come last."""
        rank = {key: index for index, key in enumerate(keys)}

        def order(record: dict) -> tuple[int, SampleKey]:
            return rank.get(key_of(record), len(rank)), key_of(record)

        return sorted(self.records, key=order)

    def take(self, keys: Iterable[SampleKey]) -> Iterator[SampleKey]:
        """Yields the tasks that are not recorded and that no other process does. Each is claimed when it is requested."""
        for key in keys:
            if self.claim(key):
                yield key

    def claim(self, key: SampleKey) -> bool:
        """Keeps other processes from doing a task until it is recorded. False if it is recorded or claimed already."""
        if key in self._keys or key in self._claimed or not self._locks.take(task_byte(key)):
            return False
        self.refresh()  # another process may have recorded it since the last reading
        if key in self._keys:
            self._locks.free(task_byte(key))
            return False
        self._claimed.add(key)
        return True

    def append(self, record: Mapping[str, object]) -> None:
        """Writes one line in one call. After it returns, killing the process cannot lose the record.

        Raises ValueError for a task that is recorded or that another process does, UserError for a record without the schema
        of the run and if the file cannot be written.
        """
        key, line = key_of(record), records.record_line(record, self._schema.digest)
        try:
            self._schema.read(line[:-1])  # a record that could not be read again is not written
        except Damaged as error:
            raise UserError(f"{self.folder}: the record of problem {key[0]}, chain {key[1]} cannot be written: "
                            f"{error}") from error
        if key not in self._claimed and not self.claim(key):
            raise ValueError(f"problem {key[0]}, chain {key[1]} is recorded already, or being drawn by another process")
        num_lines, offset = self._read.get(self._file_number, (0, 0))
        files.append_line(self.folder / self.file_name(), self._file, line)
        self._add(record, self._file_number, num_lines)
        self._read[self._file_number] = num_lines + 1, offset + len(line)
        self._claimed.discard(key)
        self._unsynced.append(key)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Forces the records onto the disk, so that they survive a failing machine, and then releases their locks."""
        with writing(self.folder / self.file_name()):
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()
        for key in self._unsynced:
            self._locks.free(task_byte(key))
        self._unsynced = []

    def is_described(self) -> bool:
        """Whether a process has described the run in `run.json`."""
        return files.read_regular(self.folder / RUN) is not None

    def write_config(self, text: str) -> None:
        with self.mutex():
            if files.read_regular(path := self.folder / CONFIG) != text.encode():
                files.write_atomically(path, text)

    def write_session(self, identity: dict, session: dict) -> None:
        """Adds an entry for this start of the run to `run.json`."""
        with self.mutex():
            sessions = described(self.folder / RUN).sessions if self.is_described() else []
            self._session = len(sessions)
            self._write_json(RUN, {"identity": identity, "sessions": [*sessions, session]})

    def add_to_session(self, values: dict) -> None:
        """Adds values to the entry of this start in `run.json`."""
        with self.mutex():
            identity, sessions = described(self.folder / RUN)
            sessions[self._session].update(values)
            self._write_json(RUN, {"identity": identity, "sessions": sessions})

    def write_summary(self, summary: dict) -> None:
        with self.mutex():
            self._write_json("summary.json", summary)

    def _write_json(self, name: str, value: dict) -> None:
        files.write_atomically(self.folder / name, json.dumps(value, indent=1) + "\n")

    def mutex(self) -> AbstractContextManager[None]:
        """A lock to hold while a file is replaced. Meanwhile no other process replaces a file or removes a temporary one."""
        return self._locks.held(MUTEX)


_SHOWN = 3


class Attempts:
    """The attempts at a run's tasks. Each process has a file of them (`attempts*.jsonl`) until the run is complete.

    A process that is killed, for example because memory runs out, takes all of its tasks in progress with it, and one of them
    may be the cause. The graceful end of a task, at Ctrl-C or a time limit, is no such end.
    """

    def __init__(self, store: RunStore):
        self._store = store
        self._file: IO | None = None

    def unfinished(self) -> Counter[SampleKey]:
        """How often each task was begun and not given up. One that another process is doing now is among them.

        Raises UserError for a damaged line.
        """
        counts: Counter[SampleKey] = Counter()
        for path in self._store.folder.glob("attempts*.jsonl"):
            for attempt in files.objects_of(path, ATTEMPTS, "repair=true moves damaged lines away"):
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

    def note(self, key: SampleKey, begun: bool) -> None:
        """Writes that a claimed task is begun, or that a begun one was given up gracefully."""
        path = self._store.folder / self._store.file_name("attempts")
        self._file = self._file or files.open_to_extend(path)
        files.append_line(path, self._file, to_line(Attempt(problem=key[0], chain=key[1], begun=begun)))

    def close(self, complete: bool) -> None:
        """Removes the files if the run is complete, or if every attempt in them was given up gracefully.

        The files stay while another process has the run open: it may have more to do than this one.
        """
        if self._file is not None:
            self._file.close()
        if complete or not any(self.unfinished().values()):
            with self._store.mutex():
                if self._store.is_alone():
                    for path in self._store.folder.glob("attempts*.jsonl"):
                        path.unlink(missing_ok=True)
