"""Reads files of records. Each line is checked against its checksum and the schema of its record, whoever reads it.

`move_damaged` moves damaged lines to `records.damaged.jsonl` on request, so that their tasks are done again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypedDict, cast

from dflash_mcmc.errors import UserError, note, writing
from dflash_mcmc.registry import components
from dflash_mcmc.store.described import RUN, described, hash_of, json_object
from dflash_mcmc.store.files import each_line, is_there, open_to_extend, read_regular, write_atomically
from dflash_mcmc.store.records import DAMAGED, Record, SampleKey, key_of, record_files, sample_schema, unit_schema
from dflash_mcmc.store.schema import IDENTITY, Count, Damaged, Schema, has_zeros, to_line, whole_lines


def schema_of(folder: Path) -> Schema:
    """The schema of a run's records by its `run.json`: of samples, or of the units of its probe.

    Without a readable `run.json`, or where its probe is not installed, only the key of a record is checked.
    """
    try:
        identity = json.loads((read_regular(folder / "run.json") or b"").decode())["identity"]
        if "probe" not in identity:
            return sample_schema()
        return unit_schema(components("probe")[identity["probe"]].cls.record_type)
    except (UserError, ValueError, LookupError, TypeError, RecursionError):  # what needs the file reports what is wrong
        return unit_schema()


def _run_of(folder: Path) -> str | None:
    """The hash of a run's identity by its `run.json`; None without a readable one."""
    try:
        return hash_of(described(folder / RUN).identity)
    except (UserError, ValueError, RecursionError):  # what needs the file reports what is wrong
        return None


def read_records(folder: Path, schema: Schema | None = None, damage: list[str] | None = None) -> list[Record]:
    """The records of a run, which may be in progress: those of `each_record`. Raises UserError for a damaged file or line."""
    return list(each_record(folder, schema, damage))


def each_record(folder: Path, schema: Schema | None = None, damage: list[str] | None = None) -> Iterator[Record]:
    """Yields the records of a run, the first one of each task. Raises UserError for a damaged file or line.

    Args:
        schema: of the records; None for that of `schema_of`.
        damage: damaged lines and files are left out, and a sentence for each is added to this list; None raises.
    """
    for _, record in each_of_file(folder, schema, damage):
        yield record


def each_of_file(folder: Path, schema: Schema | None = None, damage: list[str] | None = None) -> Iterator[tuple[Path, Record]]:
    """Yields what `each_record` does, each record with its file. A file is in the order in which its process wrote it."""
    places: dict[SampleKey, str] = {}
    of_run = (schema or schema_of(folder)).of_run(_run_of(folder))
    for path in _files(folder, damage):
        for line_number, record in records_of(path, _lines(path, damage), 0, of_run, damage):
            position, key = f"{path}: line {line_number + 1}", key_of(record)
            if key not in places:
                places[key] = position
                yield path, cast(Record, record)
            elif damage is None:
                note_repeated(key, position, places[key])
            else:
                damage.append(f"{position} repeats problem {key[0]}, chain {key[1]}")


def recorded_keys(folder: Path, schema: Schema | None = None) -> set[SampleKey]:
    """The keys of a run's records, without its locks. Raises UserError for a damaged file or line."""
    return {key_of(record) for record in each_record(folder, schema)}


def _files(folder: Path, damage: list[str] | None) -> Iterable[Path]:
    try:
        return record_files(folder).values()
    except UserError as error:
        if damage is None:
            raise
        damage.append(str(error))
        return record_files(folder, others=True).values()


def _lines(path: Path, damage: list[str] | None) -> Iterator[bytes]:
    """Yields the complete lines of a file, and prints a line if zeros follow them."""
    length = 0
    try:
        for line in each_line(path):
            yield line
            length += len(line) + 1
        rest = read_regular(path, length) or b""
    except UserError as error:
        if damage is None:
            raise
        damage.append(str(error))
        return
    if has_zeros(rest):
        note(f"{path}: ends in blocks of zeros, as after a power loss; the next start of the run removes them")


def records_of(path: Path, lines: Iterable[bytes], before: int, schema: Schema,
               damaged: list[str] | None = None) -> Iterator[tuple[int, dict]]:
    """Yields the number of each line, from 0, and its record. Raises UserError for a damaged line.

    Args:
        lines: a part of the file.
        before: number of lines of the file before this part.
        damaged: takes a sentence for each damaged line, which is left out; None raises.
    """
    for line_number, line in enumerate(lines, start=before):
        try:
            record = schema.read(line)
        except Damaged as error:
            if damaged is None:
                raise UserError(f"{path}: line {line_number + 1}: {error}; repair=true in the command of the run moves "
                                f"damaged lines to {DAMAGED} and draws them again, and the report leaves them out with "
                                "--lenient") from error
            damaged.append(f"{path}: line {line_number + 1}: {error}")
            continue
        yield line_number, record


def record_line(record: Mapping[str, object], digest: str | None) -> bytes:
    """The line of a record with the hash of its run's identity, so that records of another run are noticed."""
    return to_line(record if digest is None else {**record, IDENTITY: digest})


def note_repeated(key: SampleKey, repeat: str, first: str) -> None:
    """Prints that a second record of a sample is ignored.

    If a file server takes a live process for dead, another process can draw the same sample, with the same randomness.
    """
    note(f"{repeat} repeats problem {key[0]}, chain {key[1]}; the record in {first} is used")


class Attempt(TypedDict):
    """A line of `attempts.jsonl`."""

    problem: str
    chain: Count
    begun: bool
    """Whether the task was begun, or given up gracefully."""


ATTEMPTS = Schema(Attempt)
TRACKED = "tracked.json"
"""What each tracker has received: for each file of records a number of lines."""


def move_damaged(folder: Path, schema: Schema) -> None:
    """Moves the damaged lines of all files of records and attempts of a folder, and prints how many and where.

    The caller is alone in the folder. A process that is killed here leaves every line in at least one of the two files.
    Raises UserError for a file that cannot be written.
    """
    moved = {path: _damaged(path, schema) for path in record_files(folder).values()}
    moved |= {path: _damaged(path, ATTEMPTS) for path in sorted(folder.glob("attempts*.jsonl"))}
    # Trackers first: a process that is killed between the two lets them log some records twice, and misses none.
    for file_number, path in record_files(folder).items():
        if moved[path]:
            _tell_trackers(folder / TRACKED, file_number, moved[path])
    for path, lines in moved.items():
        if lines:
            to = folder / DAMAGED
            every = whole_lines(read_regular(path) or b"")
            with writing(to), open_to_extend(to) as file:
                file.write(b"".join(every[index] + b"\n" for index in lines))
                os.fsync(file.fileno())
            taken = set(lines)
            write_atomically(path, b"".join(line + b"\n" for index, line in enumerate(every) if index not in taken))
            print(f"{path}: {len(lines)} damaged line{'s' * (len(lines) > 1)} moved to {DAMAGED} "
                  f"(line {', '.join(str(index + 1) for index in lines[:10])}{', ...' * (len(lines) > 10)}); what they "
                  "recorded is done again", file=sys.stderr)


def _damaged(path: Path, schema: Schema) -> list[int]:
    """The numbers, from 0, of the damaged lines of a file."""
    line_numbers = []
    for line_number, line in enumerate(whole_lines(read_regular(path) or b"")):
        try:
            schema.read(line)
        except Damaged:
            line_numbers.append(line_number)
    return line_numbers


def _tell_trackers(path: Path, file_number: int, line_numbers: list[int]) -> None:
    """Lowers the numbers of lines that trackers have received by those that are moved. The new records are then logged."""
    try:
        tracked = json_object(path) if is_there(path) else {}
    except UserError:  # the tracking reports it
        return
    for received in tracked.values():
        lines = received.get("lines") if isinstance(received, dict) else None
        count = lines.get(str(file_number)) if isinstance(lines, dict) else None
        if isinstance(lines, dict) and isinstance(count, int):
            lines[str(file_number)] = count - sum(index < count for index in line_numbers)
            received["summary"] = None
    write_atomically(path, json.dumps(tracked) + "\n")
