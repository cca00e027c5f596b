"""Moves damaged lines of a run folder to `records.damaged.jsonl`, so that their tasks are done again. Only on request."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from dflash_mcmc.errors import UserError, writing
from dflash_mcmc.store.described import json_object
from dflash_mcmc.store.files import is_there, open_to_extend, read_regular, write_atomically
from dflash_mcmc.store.lines import Damaged, whole_lines
from dflash_mcmc.store.reading import attempt_of, decoded
from dflash_mcmc.store.records import DAMAGED, record_files
from dflash_mcmc.store.schema import Schema

TRACKED = "tracked.json"
"""What each tracker has received: for each file of records a number of lines."""


def move_damaged(folder: Path, schema: Schema) -> None:
    """Moves the damaged lines of all files of records and attempts of a folder, and prints how many and where.

    The caller is alone in the folder. A process that is killed here leaves every line in at least one of the two files.
    Raises UserError for a file that cannot be written.
    """
    moved = {path: _damaged(path, lambda line: decoded(line, schema)) for path in record_files(folder).values()}
    moved |= {path: _damaged(path, attempt_of) for path in sorted(folder.glob("attempts*.jsonl"))}
    for number, path in record_files(folder).items():
        if moved[path]:
            _tell_trackers(folder / TRACKED, number, moved[path])
    for path, places in moved.items():
        if places:
            _move(path, places, folder / DAMAGED)
            print(f"{path}: {len(places)} damaged line{'s' * (len(places) > 1)} moved to {DAMAGED} "
                  f"(line {', '.join(str(place + 1) for place in places[:10])}{', ...' * (len(places) > 10)}); what they "
                  "recorded is done again", file=sys.stderr)


def _damaged(path: Path, check: Callable[[bytes], object]) -> list[int]:
    """The numbers, from 0, of the damaged lines of a file."""
    places = []
    for place, line in enumerate(whole_lines(read_regular(path) or b"")[0]):
        try:
            check(line)
        except Damaged:
            places.append(place)
    return places


def _move(path: Path, places: list[int], to: Path) -> None:
    lines, _ = whole_lines(read_regular(path) or b"")
    with writing(to), open_to_extend(to) as file:
        file.write(b"".join(lines[place] + b"\n" for place in places))
        os.fsync(file.fileno())
    taken = set(places)
    write_atomically(path, b"".join(line + b"\n" for place, line in enumerate(lines) if place not in taken))


def _tell_trackers(path: Path, number: int, places: list[int]) -> None:
    """Lowers the numbers of lines that trackers have received by those that are moved. The new records are then logged."""
    try:
        tracked = json_object(path) if is_there(path) else {}
    except UserError:  # the tracking reports it
        return
    for received in tracked.values():
        lines = received.get("lines") if isinstance(received, dict) else None
        count = lines.get(str(number)) if isinstance(lines, dict) else None
        if isinstance(lines, dict) and isinstance(count, int):
            lines[str(number)] = count - sum(place < count for place in places)
            received["summary"] = None
    write_atomically(path, json.dumps(tracked) + "\n")
