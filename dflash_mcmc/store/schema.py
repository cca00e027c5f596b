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

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, cast, get_type_hints

from dflash_mcmc.errors import reason_of

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationInfo
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


def whole_lines(content: bytes) -> list[bytes]:
    """The lines that are complete of a file or of a part that begins with a line.

    What follows them is a line without a line feed, or blocks of zeros that a power loss leaves at the end of a file.
    """
    lines = content.split(b"\n")[:-1]
    while lines and _ZEROS in lines[-1]:
        lines.pop()
    return lines


def has_zeros(rest: bytes) -> bool:
    """Whether the part of a file after its complete lines has blocks of zeros."""
    return _ZEROS in rest


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SIZE).hexdigest().encode()


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
    value = dict(pairs)
    if len(value) < len(pairs):
        repeated, number = Counter(name for name, _ in pairs).most_common(1)[0]
        raise Damaged(f"{repeated[:40]}: is given {number} times in one object; allowed: once")
    return value


def _not_a_number(text: str) -> NoReturn:
    raise Damaged(f"JSON: given {text}; allowed: finite numbers")


MOST = 2**63 - 1
"""The largest whole number of a line."""
_DEEPEST = 32
IS_PLAIN = f"finite numbers, and at most {_DEEPEST} levels of nesting"
"""The words for values that `is_plain` accepts."""


@dataclass(slots=True)
class Around:
    """What has been found in the record so far: pydantic's context."""

    lengths: dict[str, int] = field(default_factory=dict)
    """The lengths that `Long` has found, by name."""
    instead: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The fields with `Instead` that the record has, with the names of those that may be absent beside them."""


class Range(NamedTuple):
    """In an annotation: the smallest and the largest number."""

    low: int = -MOST
    high: int = MOST

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "ge": self.low, "le": self.high}


class OneOf(NamedTuple):
    """In an annotation: the allowed texts."""

    values: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {"type": "literal", "expected": list(self.values)}


class AsList(NamedTuple):
    """In an annotation of a tuple: JSON has a list for it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "strict": False}


class Long(NamedTuple):
    """In an annotation of a list, a text or an object of lists: the name of its length. A whole number with it is the length.

    Lengths of one name are equal in the whole record. The first field that has the name decides.
    """

    of: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        from pydantic_core import core_schema

        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any, info: ValidationInfo[Around]) -> Any:
        from pydantic_core import PydanticCustomError

        for each in value.values() if isinstance(value, dict) else (value,):
            length = each if isinstance(each, int) else len(each)
            right = info.context.lengths.setdefault(self.of, length)
            if length != right:
                raise PydanticCustomError("length", "{right} ({of})", {
                    "given": f"{length} values", "right": right, "of": self.of})
        return value


class Instead(NamedTuple):
    """In an annotation: an object with this field may lack the required fields of these names."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        from pydantic_core import core_schema

        name = str(handler.field_name)

        def note(value: object, info: ValidationInfo[Around]) -> object:
            info.context.instead[name] = self.names
            return value

        return core_schema.with_info_before_validator_function(note, handler(source))


class Finite(NamedTuple):
    """In an annotation of values that may be anything: `is_plain` accepts them."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
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
    """The fields of an object with their types.

    Args:
        fields: TypedDicts; a field of a later one replaces that of an earlier one.
        alone: keys beside which the other required keys may be absent: `failure` in the record of a probe.
        key: keys that are required always.
    """

    def __init__(self, *fields: type, alone: Iterable[str] = (), key: Iterable[str] = ()):
        self._fields, self._alone, self._key = fields, frozenset(alone), frozenset(key)
        self.digest: str | None = None

    def of_run(self, digest: str | None) -> Schema:
        """The same schema for the records of one run. A line with the hash of another run's identity is then refused."""
        of_run = copy(self)  # copied, since `sample_schema` gives every run the same object
        of_run.digest = digest
        return of_run

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        """Raises pydantic.PydanticUserError for an annotation that it cannot check."""
        from pydantic import ConfigDict, TypeAdapter, with_config
        from typing_extensions import TypedDict

        hints = {name: hint for each in self._fields for name, hint in get_type_hints(each, include_extras=True).items()}
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

        around = Around()
        try:
            self._adapter.validate_python(value, context=around)
        except ValidationError as error:
            errors = [each for each in error.errors(include_url=False) if not self._is_allowed(each, value, around)]
            return _sentence(value, errors) if errors else None
        return None

    def _is_allowed(self, error: ErrorDetails, value: object, around: Around) -> bool:
        """Whether pydantic reports what a line may have: a key of a newer version, or a reason instead of a field."""
        given = error["input"]
        if error["type"] == "extra_forbidden":
            return is_plain(given)
        if error["type"] != "missing" or not isinstance(given, dict):  # the input is the object that lacks the field
            return False
        name = error["loc"][-1]
        if any(key in given and name in names for key, names in around.instead.items()):
            return True
        reasons = self._alone & given.keys() - around.instead.keys()
        return given is value and bool(reasons) and name not in self._key


def _sentence(value: object, errors: list[ErrorDetails]) -> str:
    """The first error. pydantic has one for each type that a value may have."""
    path, first = _place(value, errors[0]), errors[0]
    words = {"missing": "a value", "extra_forbidden": IS_PLAIN}
    allowed = dict.fromkeys(words.get(each["type"], each["msg"].removeprefix("Input should be "))
                            for each in errors if _place(value, each) == path)
    given = "nothing" if first["type"] == "missing" else first.get("ctx", {}).get("given") or shown(first["input"])
    return f"{path or 'line'}: given {given}; allowed: {' or '.join(allowed)}"


def _place(value: Any, error: ErrorDetails) -> str:
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
