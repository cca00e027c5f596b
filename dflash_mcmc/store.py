"""A run's folder: append-only records that survive any end of the process. Store failure always stops a run.

    config.yaml     the configuration, resolved, of the last start
    run.json        identity, and for each start: time, command, commit, versions, device
    records.jsonl   one line a sample, written when it is graded; records.1.jsonl, ... by the other processes of a launch
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
from typing import IO

from dflash_mcmc.errors import RunBusy, UserError
from dflash_mcmc.ranks import Team

RECORDS = "records.jsonl"
_ALL_RECORDS = "records*.jsonl"
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
    def open(cls, folder: Path, team: Team | None = None) -> Iterator[RunStore]:
        """Locks the folder, makes it where needed, reads its records. Raises RunBusy, or UserError for a corrupt file.

        The processes of a team open it together: the first mends it alone, and none writes before all have read.
        """
        team = team or Team("alone")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"paths.outputs: cannot make {folder}: {error.strerror}") from error
        store = cls(folder)
        if team.rank:
            team.wait("mended", 1)
        with _lock(folder / "lock", shared=bool(team.rank)) as lock:
            if not team.rank:
                for left in folder.glob(".*.tmp"):  # a file that a killed process was replacing
                    left.unlink()
                for path in folder.glob(_ALL_RECORDS):
                    _repair(path)
            store.records = read_records(folder)
            store._keys = store.recorded()
            if team.size > 1:
                _share(lock, folder)
                team.add("mended", 1)
                team.wait("mended", team.size)
            store._file = (folder / _records_of(team.rank)).open("ab", buffering=0)
            try:
                yield store
            finally:
                os.fsync(store._file.fileno())
                store._file.close()
                if not team.rank and not (folder / "run.json").exists() and not read_records(folder):
                    _remove(folder)

    def reread(self) -> None:
        """Takes in what other processes have recorded since."""
        self.records = read_records(self.folder)

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

    def add_to_session(self, values: dict) -> None:
        """Adds to the last start of run.json."""
        path = self.folder / "run.json"
        content = json.loads(path.read_text())
        content["sessions"][-1].update(values)
        write_atomically(path, json.dumps(content, indent=1) + "\n")

    def write_summary(self, summary: dict) -> None:
        write_atomically(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")


def read_records(folder: Path) -> list[dict]:
    """The records of a run, also of one that is being written. Raises UserError for a corrupt file."""
    records, places = [], {}
    for path in sorted(folder.glob(_ALL_RECORDS)):
        for number, record in enumerate(_parse(path, path.read_bytes())[0], start=1):
            place, key = f"{path}: line {number}", (record["problem"], record["chain"])
            if key in places:
                raise UserError(f"{place} repeats problem {key[0]}, chain {key[1]} of {places[key]}; delete one of the two")
            places[key] = place
            records.append(record)
    return records


def _records_of(rank: int) -> str:
    return f"records.{rank}.jsonl" if rank else RECORDS


def _remove(folder: Path) -> None:
    """A folder of which nothing came: the run was refused before anything was drawn."""
    for path in (*folder.glob(_ALL_RECORDS), folder / "config.yaml", folder / "lock"):
        path.unlink(missing_ok=True)
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


def _repair(path: Path) -> None:
    """Cuts off a torn last line. Raises UserError where another line is no record."""
    good = _parse(path, path.read_bytes())[1]
    if good < path.stat().st_size:
        with path.open("rb+") as file:
            file.truncate(good)


def _parse(path: Path, content: bytes) -> tuple[list[dict], int]:
    """(records, number of bytes up to the last line feed)."""
    good, records = content.rfind(b"\n") + 1, []
    for number, line in enumerate(content[:good].splitlines(), start=1):
        try:
            record = json.loads(line)
            _ = record["problem"], record["chain"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: line {number} is no record ({type(error).__name__}); move the file away to begin anew, "
                            "or delete that line to have its sample drawn again") from error
        records.append(record)
    return records, good


def _share(lock: IO, folder: Path) -> None:
    """Lets the team's other processes hold the lock too: the folder is busy while one of them lives."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunBusy(f"{folder}: another process has taken this run; try again") from error


@contextmanager
def _lock(path: Path, shared: bool) -> Iterator[IO]:
    """Held until the process ends, however it ends: the kernel lets go of it."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if not path.exists() or os.fstat(file.fileno()).st_ino != path.stat().st_ino:
                raise RunBusy(f"{path.parent}: another process has just removed this run's folder; try again")
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise RunBusy(f"{path.parent}: this run is being written by {owner}; wait for it or stop it") from error
        if not shared:
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield file
