"""Rows of a dataset, from a JSON Lines file or the hub. Every error is one line that names the file and the place."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.errors import ConfigError, UserError, did_you_mean, reason_of
from dflash_mcmc.process import hub


class MissingField(UserError):
    """Rows lack a field.

    Args:
        where: the rows.
        field: the field that they lack.
        known: the fields that they have.
        given_by: the configuration's field that names the rows.
    """

    def __init__(self, where: str, field: str, known: Iterable[str], given_by: str = "dataset.path"):
        known = list(map(str, known))
        super().__init__(f"{given_by}: {where} lacks the field {field!r}{did_you_mean(field, known)}; it has: "
                         f"{', '.join(known)}")
        self.field = field


class Hub(NamedTuple):
    """A dataset on the hub."""

    name: str
    subset: str | None = None
    split: str = "test"


def of_file(path: str | None, columns: Iterable[str], field: str = "dataset.path") -> list[dict]:
    """Rows of a JSON Lines file (`.gz` if it is gzipped) or of a .csv file. Each row has these columns. Raises UserError.

    The file is not read with the `datasets` library, because that infers one type for a column: a gold answer that looks like
    a date would become another text.
    """
    file = Path(path).expanduser() if path is not None else None
    if file is None or not file.is_file():
        raise ConfigError(field, path, "a JSON Lines file that exists")
    try:
        rows = list((_table if file.suffix == ".csv" else _parsed)(file, tuple(columns), field))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise UserError(f"{field}: cannot read {path}: {type(error).__name__}: {error}") from error
    if not rows:
        raise UserError(f"{field}: {path} has no rows")
    return rows


def of_hub(source: Hub, revision: str | None, columns: Iterable[str]) -> list[dict]:
    """Rows of a dataset on the hub at a commit. Each row has these columns. Raises UserError."""
    rows = _downloaded(source, revision)
    for number, row in enumerate(rows):
        _check_columns(row, columns, f"{source.name}@{revision}: row {number}")
    return [dict(row) for row in rows]


def _table(file: Path, columns: tuple[str, ...], field: str) -> Iterator[dict]:
    """Rows of a file of comma-separated values whose first row names the columns. All values are texts."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            _check_columns(row, columns, f"{file}: row {number}", field)
            yield row


def lines_of(file: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line of a text file that is not blank, without a byte-order mark.

    Only line feeds and carriage returns end a line: U+2028 in a JSON text does not. Raises OSError, EOFError, zlib.error and
    UnicodeDecodeError.
    """
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8-sig") as lines:
        yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _parsed(file: Path, columns: tuple[str, ...], field: str) -> Iterator[dict]:
    for number, line in lines_of(file):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = reason_of(error, 120)
            raise UserError(f"{field}: cannot read {file}: line {number} is not JSON: {reason}") from error
        if not isinstance(row, dict):
            raise UserError(f"{field}: cannot read {file}: line {number} is no JSON object: {row!r:.60}")
        _check_columns(row, columns, f"{file}: line {number}", field)
        yield row


def _check_columns(row: dict, columns: Iterable[str], where: str, field: str = "dataset.path") -> None:
    for column in columns:
        if column not in row:
            raise MissingField(where, column, row, field)


@cache
def _downloaded(source: Hub, revision: str | None) -> tuple[dict, ...]:
    import datasets

    datasets.disable_progress_bars()
    offline = not hub.reachable()
    try:
        return tuple(datasets.load_dataset(source.name, source.subset, revision=revision, split=source.split))
    except Exception as error:  # datasets raises many types; all mean that these rows cannot be read
        if offline:
            raise UserError(f"dataset: {source.name} is not in the cache, and the hub cannot be reached; allowed: a file, "
                            "dataset.path=/path/to/test.jsonl") from error
        reason = reason_of(error, 300)
        raise UserError(f"dataset.revision: cannot load {source.name}@{revision}: {type(error).__name__}: {reason}") from error
