"""Lines of JSON with a checksum, so that a line that has changed on the disk is noticed.

A line is an object whose last key is `checksum`: 16 hexadecimal digits, the BLAKE2b digest of 8 bytes of what precedes
`, "checksum"` in the line. Any JSON parser reads it. A line without the key was written by an older version.

    {"problem": "a", "chain": 0, ..., "checksum": "0d4f26bea04a050c"}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from dflash_mcmc.errors import reason_of

CHECKSUM = "checksum"
_SIZE = 8
_START, _END = f', "{CHECKSUM}": "'.encode(), b'"}'
_LENGTH = len(_START) + 2 * _SIZE + len(_END)
_MOST_CHANGED = 8
"""Number of changed bytes up to which the end of a line is taken for a damaged checksum."""
_DIGEST_AT_THE_END = re.compile(rb'"[0-9a-f]{%d}"\}$' % (2 * _SIZE))
_LIKE_A_CHECKSUM = re.compile(rb'"[^"]{6,10}": ?"[^"]{14,18}"\s*\}?\s*$')
_ZEROS = b"\0\0"


class Damaged(ValueError):
    """A line that is no line of JSON, has changed since it was written, or does not fit the schema of its file."""


class Decoded(NamedTuple):
    """The content of a line."""

    value: object
    checked: bool
    """Whether the line has a checksum."""


def to_line(value: Mapping[str, object]) -> bytes:
    """The line of an object, with its checksum and a line feed.

    Raises ValueError for an object without keys, with the key `checksum`, or with a number that is not finite.
    """
    if not value or CHECKSUM in value:
        raise ValueError(f"{sorted(value)}: a line needs keys, and {CHECKSUM} is not one of them")
    content = json.dumps(value, ensure_ascii=True, allow_nan=False).encode()[:-1]
    return content + _START + _digest(content) + _END + b"\n"


def from_line(line: bytes) -> Decoded:
    """The value of a line without its line feed. Raises Damaged."""
    end = line[-_LENGTH:]
    if end.startswith(_START) and end.endswith(_END):
        content, given = line[:-_LENGTH], end[len(_START):-len(_END)]
        if _digest(content) != given:
            raise Damaged(f"{CHECKSUM}: given {given.decode(errors='replace')!r}; allowed: {_digest(content).decode()!r}, "
                          "that of the line's content: a part of the line has changed since it was written")
        value = _parsed(line)
        if isinstance(value, dict):
            del value[CHECKSUM]
        return Decoded(value, True)
    if _is_like_a_checksum(end, line):
        raise Damaged(f"{CHECKSUM}: given {end.decode(errors='replace')!r}; allowed: 16 hexadecimal digits at the end of the "
                      "line")
    value = _parsed(line)
    if isinstance(value, dict) and CHECKSUM in value:
        raise Damaged(f"{CHECKSUM}: is not the last key, as in the lines of a run; allowed: the line as it was written, or "
                      "without this key")
    return Decoded(value, False)


def whole_lines(content: bytes) -> tuple[list[bytes], int]:
    """(the lines that are complete, the number of their bytes) of a file or of a part that begins with a line.

    What follows them is a line without a line feed, or blocks of zeros that a power loss leaves at the end of a file.
    """
    good = content.rfind(b"\n") + 1
    lines = content[:good].split(b"\n")[:-1]
    while lines and _ZEROS in lines[-1]:
        good -= len(lines.pop()) + 1
    return lines, good


def has_zeros(rest: bytes) -> bool:
    """Whether the part of a file after its complete lines has blocks of zeros."""
    return _ZEROS in rest


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SIZE).hexdigest().encode()


def _is_like_a_checksum(end: bytes, line: bytes) -> bool:
    """Whether a line ends in a checksum with some changed, missing or additional bytes."""
    if len(end) == _LENGTH:
        fixed = zip(end[:len(_START)] + end[-len(_END):], _START + _END, strict=True)
        if sum(found != byte for found, byte in fixed) <= _MOST_CHANGED:
            return True
    if _DIGEST_AT_THE_END.search(line):  # under another key: a cut has joined the last field and the checksum
        return True
    tail = _LIKE_A_CHECKSUM.search(line, max(0, len(line) - 2 * _LENGTH))
    return tail is not None and len(set(tail[0]) & set(b"0123456789abcdef")) >= _SIZE and CHECKSUM.encode()[:3] in tail[0]


def _parsed(line: bytes) -> object:
    """The JSON value of a line. Raises Damaged."""
    try:
        return json.loads(line.decode(), object_pairs_hook=_without_repeats, parse_constant=_not_a_number)
    except RecursionError as error:
        raise Damaged("JSON: is nested too deeply; allowed: a line that a run has written") from error
    except Damaged:
        raise
    except ValueError as error:
        raise Damaged(f"JSON: {reason_of(error, 80)}; allowed: a line that a run has written") from error


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise Damaged(f"{repeated[:40]}: is given {names.count(repeated)} times in one object; allowed: once")
    return found


def _not_a_number(text: str) -> NoReturn:
    raise Damaged(f"JSON: given {text}; allowed: finite numbers")
