"""A run's folder: append-only records that survive any end of the process. Store failure always stops a run.

    config.yaml     the configuration, resolved, of the last start
    run.json        identity, and for each start: time, command, commit, versions, device
    records.jsonl   one line a sample, written when it is graded
    summary.json    from the records alone

A record is one line, and a line counts only with its line feed: what a killed process left behind it is dropped when the
folder is opened for writing, and that sample is drawn again, with the same randomness.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_mcmc.errors import RunBusy, UserError

RECORDS = "records.jsonl"
_SYNC_SECONDS = 1.0


class RunStore:
    """An open run folder. `records` holds what is recorded, in the order of recording."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.records: list[dict] = []
        self._keys: set[tuple[str, int]] = set()
        self._synced = 0.0
        self._file = None

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[RunStore]:
        """Locks the folder, makes it where needed, reads its records. Raises RunBusy, or UserError for a corrupt file."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"paths.outputs: cannot make {folder}: {error.strerror}") from error
        store = cls(folder)
        with _lock(folder / "lock"):
            for left in folder.glob(".*.tmp"):  # a file that a killed process was replacing
                left.unlink()
            store.records = _repair(folder / RECORDS)
            store._keys = store.recorded()
            store._file = (folder / RECORDS).open("ab", buffering=0)
            try:
                yield store
            finally:
                os.fsync(store._file.fileno())
                store._file.close()
                if not store.records and not (folder / "run.json").exists():
                    _remove(folder)

    def recorded(self) -> set[tuple[str, int]]:
        """(problem id, chain) of every record."""
        return {(record["problem"], record["chain"]) for record in self.records}

    def append(self, record: dict) -> None:
        """Writes one line in one call. After it returns, killing the process cannot lose it."""
        if (record["problem"], record["chain"]) in self._keys:
            raise ValueError(f"problem {record['problem']}, chain {record['chain']} is recorded already")
        line = json.dumps(record, ensure_ascii=True, allow_nan=False).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(f"{self.folder / RECORDS}: a record was written in part: is the disk full?")
        self.records.append(record)
        self._keys.add((record["problem"], record["chain"]))
        if time.monotonic() - self._synced > _SYNC_SECONDS:  # against a failing machine, not a failing process
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def write_config(self, text: str) -> None:
        write_atomically(self.folder / "config.yaml", text)

    def write_session(self, identity: dict, session: dict) -> None:
        """Adds a start of the run to run.json."""
        path = self.folder / "run.json"
        sessions = json.loads(path.read_text())["sessions"] if path.is_file() else []
        write_atomically(path, json.dumps({"identity": identity, "sessions": [*sessions, session]}, indent=1) + "\n")

    def write_summary(self, summary: dict) -> None:
        write_atomically(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")


def read_records(folder: Path) -> list[dict]:
    """The records of a run, also of one that is being written. Raises UserError for a corrupt file."""
    path = folder / RECORDS
    return _parse(path, path.read_bytes())[0] if path.is_file() else []


def _remove(folder: Path) -> None:
    """A folder of which nothing came: the run was refused before anything was drawn."""
    for name in (RECORDS, "config.yaml", "lock"):
        (folder / name).unlink(missing_ok=True)
    for empty in (folder, folder.parent):
        try:
            empty.rmdir()
        except OSError:  # something else is in it
            return


def write_atomically(path: Path, text: str) -> None:
    """The file is the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _repair(path: Path) -> list[dict]:
    """Reads the records and cuts off a torn last line."""
    if not path.is_file():
        return []
    records, good = _parse(path, path.read_bytes())
    if good < path.stat().st_size:
        with path.open("rb+") as file:
            file.truncate(good)
    return records


def _parse(path: Path, content: bytes) -> tuple[list[dict], int]:
    """(records, number of bytes up to the last line feed)."""
    good = content.rfind(b"\n") + 1
    records, seen = [], set()
    for number, line in enumerate(content[:good].splitlines(), start=1):
        try:
            record = json.loads(line)
            key = (record["problem"], record["chain"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: line {number} is no record ({type(error).__name__}); move the file away to begin anew, "
                            "or delete that line to have its sample drawn again") from error
        if key in seen:
            raise UserError(f"{path}: line {number} repeats problem {key[0]}, chain {key[1]}; delete one of the two")
        seen.add(key)
        records.append(record)
    return records, good


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held until the process ends, however it ends: the kernel lets go of it."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or os.fstat(file.fileno()).st_ino != path.stat().st_ino:
                raise RunBusy(f"{path.parent}: another process has just removed this run's folder; try again")
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise RunBusy(f"{path.parent}: this run is being written by {owner}; wait for it or stop it") from error
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
