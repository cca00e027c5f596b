"""The schema of a file's lines: the annotations of a TypedDict, checked by pydantic.

    class Sample(TypedDict):  # of typing_extensions, as pydantic demands before Python 3.12
        chain: Count
        verdict: Annotated[str, OneOf(("correct", "wrong"))]
        level: int | None
        measures: NotRequired[dict[str, float]]

    Schema(Sample).fault({"chain": True, "verdict": "correct", "level": None})
    # "chain: given True; allowed: a valid integer"

Nothing is converted: a JSON `true` is no number, and neither is a text. A whole number counts as a float, as in annotations.
Keys that the TypedDict does not have are allowed: a newer version may have added them. A field may hold objects of another
TypedDict, alone, in lists or in objects. The field of an error is then a path: `cells[2].trace.cut`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, NotRequired, get_type_hints

from dflash_mcmc.store.bounds import IS_PLAIN, Around, is_plain

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring = 2, 60


class Schema:
    """The fields of an object with their types.

    Args:
        fields: TypedDicts; a field of a later one replaces that of an earlier one. Bounds are in `bounds.py`.
        may_lack: required keys that older versions do not write.
        alone: keys beside which the other required keys may be absent: `failure` in the record of a probe.
        key: keys that are required always.
    """

    def __init__(self, *fields: type, may_lack: Iterable[str] = (), alone: Iterable[str] = (), key: Iterable[str] = ()):
        self._fields, self._may_lack = fields, frozenset(may_lack)
        self._alone, self._key = frozenset(alone), frozenset(key)
        self.run: str | None = None

    def of_run(self, run: str | None) -> Schema:
        """The same schema for the records of one run. A line with the hash of another run's identity is then refused."""
        found = copy(self)
        found.run = run
        return found

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        """Raises pydantic.PydanticUserError for an annotation that it cannot check."""
        from pydantic import ConfigDict, TypeAdapter, with_config
        from typing_extensions import TypedDict

        hints = {name: hint for each in self._fields for name, hint in get_type_hints(each, include_extras=True).items()}
        fields = {name: NotRequired[hint] if name in self._may_lack else hint for name, hint in hints.items()}
        line: Any = TypedDict("line", fields)  # type: ignore[misc]  # mypy wants fields that it can read
        return TypeAdapter(with_config(ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))(line))

    def fault(self, value: object) -> str | None:
        """What is wrong with a value: `field: given X; allowed: Y`; None if it has the schema."""
        from pydantic import ValidationError

        around = Around()
        try:
            self._adapter.validate_python(value, context=around)
        except ValidationError as error:
            found = [each for each in error.errors(include_url=False) if not self._is_allowed(each, value, around)]
            return _sentence(value, found) if found else None
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
    place, first = _place(value, errors[0]), errors[0]
    allowed = dict.fromkeys(_allowed(each) for each in errors if _place(value, each) == place)
    given = "nothing" if first["type"] == "missing" else first.get("ctx", {}).get("given") or shown(first["input"])
    return f"{place or 'line'}: given {given}; allowed: {' or '.join(allowed)}"


def _allowed(error: ErrorDetails) -> str:
    """The allowed values in words."""
    words = {"missing": "a value", "extra_forbidden": IS_PLAIN}
    return words.get(error["type"], error["msg"].removeprefix("Input should be "))


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
