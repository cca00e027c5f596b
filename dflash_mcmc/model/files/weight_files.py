"""Headers and indices of safetensors files, checked before anything is computed from their numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
"""Bytes of a header, the limit of the safetensors library."""


class DamagedError(ValueError):
    """What is wrong with a file, in words."""


class Stored(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: str
    """The format's own name: BF16."""
    shape: tuple[int, ...]
    begin: int
    end: int
    """The first byte, and the one after the last, counted from the end of the header."""


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises DamagedError, also for a text that is nested too deeply for the parser."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"no JSON: {error}") from error


def read_header(opened: BinaryIO, file: Path) -> tuple[bytes, list[Stored]]:
    """The header of an open safetensors file, and its tensors in the order of the header.

    The tensors must fill the file without gaps and overlaps, as the safetensors library demands.

    Raises:
        DamagedError: for anything that is not such a file.
    """
    size, length = file.stat().st_size, int.from_bytes(opened.read(_LENGTH_BYTES), "little")
    if not 0 < length <= min(size - _LENGTH_BYTES, _LONGEST_HEADER):
        raise DamagedError(f"a file of {size:,} bytes whose header has {length:,} bytes")
    header = opened.read(length)
    values = read_json(header)
    if not isinstance(values, dict):
        raise DamagedError(f"the header is a {type(values).__name__} and no mapping")
    tensors = [_stored(name, value) for name, value in values.items() if name != "__metadata__"]
    expected = 0
    for tensor in sorted(tensors, key=lambda stored: (stored.begin, stored.end)):
        if tensor.begin != expected:
            raise DamagedError(f"a tensor begins at byte {tensor.begin} where byte {expected} is the next")
        expected = tensor.end
    if expected != size - _LENGTH_BYTES - length:
        raise DamagedError(f"tensors of {expected:,} bytes where {size - _LENGTH_BYTES - length:,} follow the header")
    return header, tensors


def files_of_index(index: Path) -> list[Path]:
    """The files of a checkpoint's index, without repetition. Raises DamagedError."""
    try:
        values = read_json(index.read_bytes())
    except OSError as error:
        raise DamagedError(f"cannot be read: {error.strerror}") from error
    names = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(names, dict) or not names:
        raise DamagedError("no weight_map, or an empty one")
    for name in names.values():
        if not isinstance(name, str) or not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise DamagedError(f"the weight_map has {name!r:.40} for the name of a file beside it")
    return [index.parent / name for name in sorted(set(names.values()))]


def _stored(name: str, value: object) -> Stored:
    """One entry of a header. Raises DamagedError."""
    fields = value if isinstance(value, dict) else {}
    shape, offsets = fields.get("shape"), fields.get("data_offsets")
    if not (_are_counts(shape) and _are_counts(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise DamagedError(f"tensor {name!r:.60} has the shape {shape!r:.40} and the offsets {offsets!r:.40}")
    numbers, size = math.prod(shape), offsets[1] - offsets[0]
    if numbers > 8 * size:  # the smallest numbers take one bit
        raise DamagedError(f"tensor {name!r:.60} has {numbers:,} numbers in {size:,} bytes")
    return Stored(name, str(fields.get("dtype")), tuple(shape), *offsets)


def _are_counts(values: object) -> TypeGuard[list[int]]:
    """Whether a value is a list of whole numbers >= 0. Truth values are none."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
