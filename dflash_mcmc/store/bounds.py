"""Bounds in the annotations of a record's fields. `schema.py` has pydantic check them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, ValidationInfo

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


class Letters(NamedTuple):
    """In an annotation: the characters that a text consists of."""

    allowed: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "pattern": f"^[{self.allowed}]*$"}


class AsList(NamedTuple):
    """In an annotation of a tuple: JSON has a list for it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "strict": False}


class Long(NamedTuple):
    """In an annotation of a list, a text or an object of lists: the name of its length. A whole number with it is the length.

    Lengths of one name are equal in the whole record, or in each value with `Anew`. The first field that has the name decides.
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


class Anew(NamedTuple):
    """In an annotation: lengths of this name are those of one value, and not of the whole record."""

    of: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        from pydantic_core import core_schema

        return core_schema.with_info_before_validator_function(self._forget, handler(source))

    def _forget(self, value: object, info: ValidationInfo[Around]) -> object:
        info.context.lengths.pop(self.of, None)
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


def is_plain(value: Any) -> bool:
    """Whether a JSON value has finite numbers and few levels. Without recursion, because a file may hold any depth."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [each for each in level if isinstance(each, (float, list, dict))]
        if any(isinstance(each, float) and not math.isfinite(each) for each in level):
            return False
        level = [inner for each in level if not isinstance(each, float)
                 for inner in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return True
    return False


Whole = Annotated[int, Range()]
"""A whole number."""
Count = Annotated[int, Range(0)]
"""A number of things."""
