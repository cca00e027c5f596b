"""Reads files of records. Each line is checked against its checksum and the schema of its record, whoever reads it.

`move_damaged` moves damaged lines to `records.damaged.jsonl` on request, so that their tasks are done again.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypedDict, cast

from dflash_mcmc.errors import UserError, note, writing
from dflash_mcmc.store.described import RUN, hash_of, json_object, object_if_readable
from dflash_mcmc.store.files import each_line, is_there, open_to_extend, write_atomically
from dflash_mcmc.store.records import DAMAGED, Record, SampleKey, key_of, record_files, sample_schema, unit_schema
from dflash_mcmc.store.schema import IDENTITY, Count, Damaged, Schema, to_line


def schema_of(folder: Path, given: Schema | None = None) -> Schema:
    """The schema of a run's records by its `run.json`: of samples, or of the units of its probe, with the run's hash.

    Without a readable `run.json` only the key of a record is checked, and that its numbers are finite.

    Args:
        given: a schema that is known.
    """
    identity = object_if_readable(folder / RUN).get("identity")  # what needs the file reports what is wrong with it
    if not isinstance(identity, dict):
        identity = {}
    if given is None:
        given = sample_schema() if identity and "probe" not in identity else unit_schema()
    return given.of_run(hash_of(identity) if identity else None)


def read_records(folder: Path, schema: Schema | None = None, damage: list[str] | None = None) -> list[Record]:
    """The records of a run, which may be in progress: those of `each_record`. Raises UserError for a damaged file or line."""
    return [record for _, record in each_record(folder, schema, damage)]


def each_record(folder: Path, schema: Schema | None = None, damage: list[str] | None = None) -> Iterator[tuple[Path, Record]]:
    """Yields the file and the record of each task of a run, the first one. A file is in the order of its process.

    Raises UserError for a damaged file or line.

    Args:
        schema: of the records; None for that of `schema_of`.
        damage: damaged lines and files are left out, and a sentence for each is added to this list; None raises.
    """
    places: dict[SampleKey, str] = {}
    of_run = schema_of(folder, schema)
    try:
        files = record_files(folder)
    except UserError as error:
        _note_damage(error, damage)
        files = record_files(folder, others=True)
    for path in files.values():
        try:
            for line_number, record in records_of(path, each_line(path), 0, of_run, damage):
                position, key = f"{path}: line {line_number + 1}", key_of(record)
                if key not in places:
                    places[key] = position
                    yield path, cast(Record, record)
                elif damage is None:
                    note_repeated(key, position, places[key])
                else:
                    damage.append(f"{position} repeats problem {key[0]}, chain {key[1]}")
        except UserError as error:
            _note_damage(error, damage)


def _note_damage(error: UserError, damage: list[str] | None) -> None:
    if damage is None:
        raise error
    damage.append(str(error))


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
    for path, taken in moved.items():
        if taken:
            to = folder / DAMAGED
            every = list(each_line(path))
            with writing(to), open_to_extend(to) as file:
                file.write(b"".join(every[index] + b"\n" for index in sorted(taken)))
                os.fsync(file.fileno())
            write_atomically(path, b"".join(line + b"\n" for index, line in enumerate(every) if index not in taken))
            print(f"{path}: {len(taken)} damaged line{'s' * (len(taken) > 1)} moved to {DAMAGED} "
                  f"(line {', '.join(str(index + 1) for index in sorted(taken)[:10])}{', ...' * (len(taken) > 10)}); what "
                  "they recorded is done again", file=sys.stderr)


def _damaged(path: Path, schema: Schema) -> set[int]:
    """The numbers, from 0, of the damaged lines of a file."""
    line_numbers = set()
    for line_number, line in enumerate(each_line(path)):
        try:
            schema.read(line)
        except Damaged:
            line_numbers.add(line_number)
    return line_numbers


def _tell_trackers(path: Path, file_number: int, line_numbers: Iterable[int]) -> None:
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
