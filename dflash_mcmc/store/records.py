"""Files of records: a record is one line of JSON, and a line counts only with its line feed.

`records.jsonl`, and `records.1.jsonl`, ... by processes that draw at the same time.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from dflash_mcmc.errors import UserError, note

SampleKey = tuple[str, int]
"""Problem id and chain."""
RECORDS = "records.jsonl"


def records_file(number: int, stem: str = "records") -> str:
    """Name of a process's file of records, by its number."""
    return f"{stem}.{number}.jsonl" if number else f"{stem}.jsonl"


def record_files(folder: Path) -> dict[int, Path]:
    """The files of records by their numbers, in order."""
    named = [(re.fullmatch(r"records(?:\.(\d+))?\.jsonl", path.name), path) for path in folder.glob("records*.jsonl")]
    return dict(sorted((int(match[1] or 0), path) for match, path in named if match))


def read_records(folder: Path) -> list[dict]:
    """The records of a run, also of one that is being written. Raises UserError for a corrupt file."""
    records, places = [], {}
    for path in record_files(folder).values():
        for number, record in enumerate(parse(path, path.read_bytes())[0], start=1):
            place, key = f"{path}: line {number}", (record["problem"], record["chain"])
            if key in places:
                tell_repeated(key, place, places[key])
                continue
            places[key] = place
            records.append(record)
    return records


def parse(path: Path, content: bytes, before: int = 0) -> tuple[list[dict], int]:
    """(records, number of bytes up to the last line feed) of what follows so many lines of the file."""
    good, records = content.rfind(b"\n") + 1, []
    for number, line in enumerate(content[:good].splitlines(), start=before + 1):
        try:
            record = json.loads(line)
            _ = record["problem"], record["chain"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: line {number} is no record ({type(error).__name__}); move the file away to begin anew, "
                            "or delete that line to have its sample drawn again") from error
        records.append(record)
    return records, good


def tell_repeated(key: SampleKey, place: str, first: str) -> None:
    """A file server that takes a live process for dead lets two draw one sample, with the same randomness: one counts."""
    note(f"{place} repeats problem {key[0]}, chain {key[1]} of {first}, which counts")
