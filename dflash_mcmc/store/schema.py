"""Lines of JSON with a checksum, and their schema: the annotations of a TypedDict with their bounds, checked by pydantic.

A line is an object whose last key is `checksum`: 16 hexadecimal digits, the BLAKE2b digest of 8 bytes of what precedes
`, "checksum"` in the line. Any JSON parser reads it.

    {"problem": "a", "chain": 0, ..., "checksum": "0d4f26bea04a050c"}

A schema:

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

import hashlib
import json
import math
import reprlib
from collections.abc import Mapping
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast, get_type_hints

from dflash_mcmc.errors import reason_of

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
