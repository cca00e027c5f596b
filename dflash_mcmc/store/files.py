"""Writes and reads files whose lines are JSON with a checksum. Neither the end of the process nor a full disk leaves a part.

A line is an object whose last key is `checksum`: 16 hexadecimal digits, the BLAKE2b digest of 8 bytes of what precedes
`, "checksum"` in the line. Any JSON parser reads it.

    {"problem": "a", "chain": 0, ..., "checksum": "0d4f26bea04a050c"}

A schema is the annotations of a TypedDict with their bounds, checked by pydantic:

    class Sample(TypedDict):  # of typing_extensions, as pydantic demands before Python 3.12
        chain: Count
        verdict: Annotated[str, OneOf(("correct", "wrong"))]
        level: int | None
        measures: NotRequired[dict[str, float]]

    Schema(Sample).fault({"chain": True, "verdict": "correct", "level": None})
    # "chain: given True; allowed: a valid integer"
    Schema(Sample).read(line)  # the object of a line; raises Damaged

Nothing is converted: a JSON `true` is no number, and neither is a text. A whole number counts as a float, as in annotations.
Keys that the TypedDict does not have are allowed: a newer version may have added them. A field may hold objects of another
TypedDict, alone, in lists or in objects. The field of an error is then a path: `cells[2].trace.cut`.
"""

import errno
import hashlib
import json
import math
import os
import reprlib
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NamedTuple, cast, get_type_hints

from dflash_mcmc.errors import UserError, note, reason_of, writing

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import ErrorDetails


CHECKSUM = "checksum"
IDENTITY = "identity"
"""The key of a line with the hash of its run's identity, before the checksum. Records in memory lack it."""
_SIZE = 8
_START, _END = f', "{CHECKSUM}": "'.encode(), b'"}'
_LENGTH = len(_START) + 2 * _SIZE + len(_END)
_ZEROS = b"\0\0"


class Damaged(ValueError):
    """A line that is no line of JSON, has changed since it was written, or does not fit the schema of its file."""


def to_line(value: Mapping[str, object]) -> bytes:
    """The line of an object, with its checksum and a line feed.

    Raises ValueError for an object without keys, with the key `checksum`, or with a number that is not finite.
    """
    if not value or CHECKSUM in value:
        raise ValueError(f"{sorted(value)}: a line needs keys, and {CHECKSUM} is not one of them")
    content = json.dumps(value, ensure_ascii=True, allow_nan=False).encode()[:-1]
    return content + _START + _digest(content) + _END + b"\n"


def from_line(line: bytes) -> object:
    """The value of a line without its line feed. Raises Damaged."""
    content, end = line[:-_LENGTH], line[-_LENGTH:]
    if not (end.startswith(_START) and end.endswith(_END)):
        _parsed(line)  # says what is wrong with a line that is no JSON
        raise Damaged(f"{CHECKSUM}: given a line without one; allowed: 16 hexadecimal digits under the last key of the line, "
                      "as a run has written it")
    if _digest(content) != (digest := end[len(_START):-len(_END)]):
        raise Damaged(f"{CHECKSUM}: given {digest.decode(errors='replace')!r}; allowed: {_digest(content).decode()!r}, "
                      "that of the line's content: a part of the line has changed since it was written")
    value = _parsed(line)
    if isinstance(value, dict):
        del value[CHECKSUM]
    return value


def has_zeros(rest: bytes) -> bool:
    """Whether the part of a file after its complete lines has blocks of zeros."""
    return _ZEROS in rest


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SIZE).hexdigest().encode()


def _parsed(line: bytes) -> object:
    """The JSON value of a line. Raises Damaged."""
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"JSON: {reason_of(error, 80)}; allowed: a line that a run has written") from error


MOST = 2**63 - 1
"""The largest whole number of a line."""
_DEEPEST = 32
IS_PLAIN = f"finite numbers, and at most {_DEEPEST} levels of nesting"
"""The words for values that `is_plain` accepts."""


class Range(NamedTuple):
    """In an annotation: the smallest and the largest number."""

    low: int = -MOST
    high: int = MOST

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> Any:
        return {**handler(source), "ge": self.low, "le": self.high}


class OneOf(NamedTuple):
    """In an annotation: the allowed texts."""

    values: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> Any:
        return {"type": "literal", "expected": list(self.values)}


class AsList(NamedTuple):
    """In an annotation of a tuple: JSON has a list for it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> Any:
        return {**handler(source), "strict": False}


class Finite(NamedTuple):
    """In an annotation of values that may be anything: `is_plain` accepts them."""

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> Any:
        from pydantic_core import PydanticCustomError, core_schema

        def check(value: object) -> object:
            if not is_plain(value):
                raise PydanticCustomError("plain", IS_PLAIN)
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))


def is_plain(value: Any, deepest: int = _DEEPEST, finite: bool = True) -> bool:
    """Whether a JSON value has finite numbers and few levels. Without recursion, because a file may hold any depth."""
    level = [value]
    for _ in range(deepest):
        level = [each for each in level if isinstance(each, (float, list, dict))]
        if finite and any(isinstance(each, float) and not math.isfinite(each) for each in level):
            return False
        level = [inner for each in level if not isinstance(each, float)
                 for inner in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return True
    return False


def loaded(text: str, **options: Any) -> Any:
    """The value of a JSON text of others. Raises ValueError, also for a value that is nested too deeply for a recursion."""
    try:
        if is_plain(value := json.loads(text, **options), 2 * _DEEPEST, finite=False):
            return value
    except RecursionError:
        pass
    raise ValueError(f"it has more than {2 * _DEEPEST} levels of nesting")


Whole = Annotated[int, Range()]
"""A whole number."""
Count = Annotated[int, Range(0)]
"""A number of things."""


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring = 2, 60


class Schema:
    """The fields of an object with their types."""

    def __init__(self, fields: type):
        self._fields = fields
        self.digest: str | None = None

    def of_run(self, digest: str | None) -> "Schema":
        """The same schema for the records of one run. A line with the hash of another run's identity is then refused."""
        of_run = copy(self)  # copied, since `sample_schema` gives every run the same object
        of_run.digest = digest
        return of_run

    @cached_property
    def _adapter(self) -> "TypeAdapter[Any]":
        """Raises pydantic.PydanticUserError for an annotation that it cannot check."""
        from pydantic import ConfigDict, TypeAdapter, with_config
        from typing_extensions import TypedDict

        hints = get_type_hints(self._fields, include_extras=True)
        line: Any = TypedDict("line", hints)  # type: ignore[misc]  # mypy wants fields that it can read
        return TypeAdapter(with_config(ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))(line))

    def read(self, line: bytes) -> dict[str, Any]:
        """The object of a line, without `IDENTITY`. Raises Damaged, also for a line of another run."""
        value = from_line(line)
        digest = value.pop(IDENTITY, self.digest) if isinstance(value, dict) else self.digest
        if self.digest not in (None, digest):
            raise Damaged(f"{IDENTITY}: given {digest!r:.40}; allowed: {self.digest!r}, the hash of this run: the record "
                          "belongs to another run")
        if fault := self.fault(value):
            raise Damaged(fault)
        return cast("dict[str, Any]", value)

    def fault(self, value: object) -> str | None:
        """What is wrong with a value: `field: given X; allowed: Y`; None if it has the schema."""
        from pydantic import ValidationError

        try:
            self._adapter.validate_python(value)
        except ValidationError as error:
            # A key of a newer version is allowed.
            errors = [each for each in error.errors(include_url=False)
                      if each["type"] != "extra_forbidden" or not is_plain(each["input"])]
            return _sentence(value, errors) if errors else None
        return None


def _sentence(value: object, errors: "list[ErrorDetails]") -> str:
    """The first error. pydantic has one for each type that a value may have."""
    path, first = _place(value, errors[0]), errors[0]
    words = {"missing": "a value", "extra_forbidden": IS_PLAIN}
    allowed = dict.fromkeys(words.get(each["type"], each["msg"].removeprefix("Input should be "))
                            for each in errors if _place(value, each) == path)
    given = "nothing" if first["type"] == "missing" else shown(first["input"])
    return f"{path or 'line'}: given {given}; allowed: {' or '.join(allowed)}"


def _place(value: Any, error: "ErrorDetails") -> str:
    """The path of an error in a value, without the names of types that pydantic appends."""
    path = ""
    for step in error["loc"]:
        if isinstance(value, dict) and (step in value or error["type"] == "missing"):
            path, value = f"{path}.{shown(step)[1:-1]}", value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            path, value = f"{path}[{step}]", value[step] if step < len(value) else None
    return path.removeprefix(".")


def shown(value: object) -> str:
    """A value in an error of one line."""
    return " ".join(_SHORT.repr(value).split())


_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"),
          (stat.S_ISBLK, "a device"))


def is_there(path: Path) -> bool:
    """Whether a regular file, or a link to one, has this path. Raises UserError for anything else, such as a pipe."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise UserError(f"{path}: is a link to {os.readlink(path)!r:.80}, which does not exist; allowed: a regular file; "
                            "remove the link") from None
        return False
    except OSError as error:  # a link to itself, a file in place of a folder, or no permission
        raise UserError(f"{path}: cannot be read: {error.strerror}; allowed: a regular file") from error
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "no file")
        raise UserError(f"{path}: is {kind}; allowed: a regular file; move it away")
    return True


def read_regular(path: Path, offset: int = 0) -> bytes | None:
    """The content of a file from an offset on; None if there is no file. Never waits for a writer.

    Raises UserError for anything but a regular file, and for one that cannot be read.
    """
    if not is_there(path):
        return None
    try:
        with _opened(path) as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:  # another process has just removed it
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; allowed: a file that can be read") from error


def each_line(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yields the complete lines of a file, without their line feeds, from an offset at which a line begins.

    What follows them is a line without a line feed, or blocks of zeros that a power loss leaves at the end of a file. It holds
    one line at a time, however long the file is. Raises UserError as `read_regular` does.
    """
    if not is_there(path):
        return
    zeros: list[bytes] = []  # lines with blocks of zeros count only if another line follows them
    try:
        with _opened(path) as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                zeros.append(line[:-1])
                if not has_zeros(line):
                    yield from zeros
                    zeros = []
    except FileNotFoundError:  # another process has just removed it
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; allowed: a file that can be read") from error


def _opened(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def objects_of(path: Path, schema: Schema, advice: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file's complete lines; none without the file.

    Raises UserError, which ends with `advice`, for a line that is damaged or has another schema, and as `read_regular` does.
    """
    for line_number, line in enumerate(each_line(path), start=1):
        try:
            found = schema.read(line)
        except Damaged as error:
            raise UserError(f"{path}: line {line_number}: {error}; {advice}") from error
        yield found


def make_folder(folder: Path, field: str) -> list[Path]:
    """Makes a folder and its parents. Returns those that were not there, the innermost first.

    Args:
        field: the option that an error names. Raises UserError.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{field}: cannot make {folder}: {error.strerror}; allowed: a folder that can be "
                        "written to") from error
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes folders, the innermost first, up to the first one that has content."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def refuse_link(path: Path) -> None:
    """Raises UserError for a link: what a run writes or cuts must be in its own folder."""
    if path.is_symlink():
        raise UserError(f"{path}: is a link to {os.readlink(path)!r:.80}; allowed: a regular file, which a run may change; "
                        "put a copy of the file here")


def open_to_extend(path: Path) -> IO[bytes]:
    """The file, unbuffered, to add lines at its end; a new one if there is none.

    Whatever follows its last complete line is removed first: a part of a line that a killed process has left, or zeros that a
    power loss has left. Raises UserError, also for a link.
    """
    refuse_link(path)
    with writing(path):
        if is_there(path):
            length = sum(len(line) + 1 for line in each_line(path))
            if rest := read_regular(path, length):
                if has_zeros(rest):
                    note(f"{path}: {len(rest):,} bytes at its end were removed: blocks of zeros, as after a power loss. What "
                         "was written there is done again")
                with open(path, "rb+", opener=_without_links) as file:
                    file.truncate(length)
        return open(path, "ab", buffering=0, opener=_without_links)


def open_to_append(path: Path) -> IO[bytes]:
    """The file, to add output of any kind at its end; a new one if there is none. Raises UserError, also for a link."""
    refuse_link(path)
    is_there(path)  # a pipe would wait for a reader
    with writing(path):
        return open(path, "ab", opener=_without_links)


def _without_links(path: str, flags: int) -> int:
    """For `open`: a link that appears between a check and the opening is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def append_line(path: Path, file: IO, line: bytes) -> None:
    """Appends the whole line or nothing. The file is unbuffered and has no other writer. Raises UserError."""
    with writing(path):
        size = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "a line was written in part: is the disk full?")
        except OSError:
            file.truncate(size)  # a partial line would join the next one
            raise


def write_atomically(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Replaces the file: readers see the old or the new content, never a part. Raises UserError.

    Args:
        durable: whether this holds even if the machine fails at that moment.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # nobody can put a link there before
    with writing(path):
        try:
            with open(temporary, "xb", opener=_without_links) as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
