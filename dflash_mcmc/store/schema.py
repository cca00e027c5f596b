"""The schema of a file's lines, made from the annotations of a TypedDict.

    class Sample(TypedDict):
        chain: Count
        verdict: Annotated[str, OneOf(("correct", "wrong"))]
        level: int | None
        measures: NotRequired[dict[str, float]]

    Schema(Sample).fault({"chain": True, "verdict": "correct", "level": None})
    # "chain: given True; allowed: a whole number from 0 to 9223372036854775807"

A JSON `true` is no number. A whole number counts as a float, as in annotations. Keys that the TypedDict does not have are
allowed: a newer version may have added them.
"""

from __future__ import annotations

import math
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

MOST = 2**63 - 1
"""The largest whole number of a line."""
_LARGEST = math.nextafter(math.inf, 0.0)
_DEEPEST = 32
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring = 2, 60


class Range(NamedTuple):
    """In an annotation: the smallest and the largest number."""

    low: int = -MOST
    high: int = MOST


class OneOf(NamedTuple):
    """In an annotation: the allowed texts."""

    values: tuple[str, ...]


Count = Annotated[int, Range(0)]
"""A number of things."""


class _Kind(NamedTuple):
    """The allowed values of a field."""

    words: str
    """The allowed values in words."""
    accepts: Callable[[Any], bool]
    all_of: Callable[[Iterable[Any]], bool]
    """Whether every value of a list is allowed. Faster than `accepts` for each."""


class Schema:
    """The fields of an object with their types.

    Args:
        fields: TypedDicts. `Range` and `OneOf` in their annotations are bounds.
        may_lack: required keys that older versions do not write.
        alone: keys beside which the other required keys may be absent: `failure` in the record of a probe.
        key: keys that are required always.
    """

    def __init__(self, *fields: type, may_lack: Iterable[str] = (), alone: Iterable[str] = (), key: Iterable[str] = ()):
        hints = {name: hint for each in fields for name, hint in typing.get_type_hints(each, include_extras=True).items()}
        self._kinds = {name: _kind_of(hint) for name, hint in hints.items()}
        self._required = frozenset(name for name, hint in hints.items()
                                   if typing.get_origin(hint) is not NotRequired) - frozenset(may_lack)
        self._alone, self._key = frozenset(alone), frozenset(key)

    def fault(self, value: object) -> str | None:
        """What is wrong with a value: `field: given X; allowed: Y`; None if it has the schema."""
        if not isinstance(value, dict):
            return f"line: given {shown(value)}; allowed: an object"
        required = self._key if self._alone & value.keys() else self._required
        for name in sorted(required - value.keys()):
            return f"{name}: given nothing; allowed: {self._kinds[name].words}"
        for name, found in value.items():
            kind = self._kinds.get(name, _ANYTHING)
            if not kind.accepts(found):
                return f"{shown(name)[1:-1]}: given {shown(found)}; allowed: {kind.words}"
        return None


def shown(value: object) -> str:
    """A value in an error of one line."""
    return " ".join(_SHORT.repr(value).split())


def _is_plain(value: Any) -> bool:
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


def _scalar(words: str, kinds: set[type], low: float = -MOST, high: float = MOST) -> _Kind:
    """Values of these types. Numbers are from `low` to `high`."""
    numbers = bool(kinds & {int, float})
    only_numbers = kinds <= {int, float}

    def accepts(value: Any) -> bool:
        return type(value) in kinds and (not numbers or isinstance(value, (str, bool, types.NoneType)) or low <= value <= high)

    def all_of(values: Iterable[Any]) -> bool:
        found = list(values)
        if not set(map(type, found)) <= kinds:
            return False
        if high == _LARGEST:
            return math.inf not in found and -math.inf not in found
        bounded = found if only_numbers else [value for value in found if isinstance(value, (int, float))] if numbers else []
        return not bounded or (low <= min(bounded) and max(bounded) <= high)

    return _Kind(words, accepts, all_of)


_ANYTHING = _Kind(f"finite numbers, and at most {_DEEPEST} levels of nesting", _is_plain,
                  lambda values: all(map(_is_plain, values)))
_WORDS: dict[object, tuple[str, set[type], float]] = {
    str: ("a text", {str}, MOST), bool: ("true or false", {bool}, MOST), types.NoneType: ("null", {types.NoneType}, MOST),
    int: ("a whole number", {int}, MOST), float: ("a finite number", {int, float}, _LARGEST)}


def _kind_of(hint: Any) -> _Kind:
    """The allowed values of an annotation. Raises TypeError for one that JSON has no value for."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _WORDS:
        words, kinds, most = _WORDS[hint]
        return _scalar(words, kinds, -most, most)
    if hint in (Any, object):
        return _ANYTHING
    if origin is NotRequired:
        return _kind_of(arguments[0])
    if origin is Annotated:
        return _bounded(_kind_of(arguments[0]), arguments[0], arguments[1:])
    if origin is Literal:
        return _one_of(arguments)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin in (list, Sequence):
        return _list_of(_kind_of(arguments[0]))
    if origin is dict:  # in Python true is a whole number, so an object of whole numbers may have it
        of = arguments[1]
        return _object_of(_kind_of(of | bool if int in (of, *typing.get_args(of)) else of))
    raise TypeError(f"{hint}: has no JSON values")


def _bounded(kind: _Kind, base: object, bounds: Sequence[object]) -> _Kind:
    for bound in bounds:
        if isinstance(bound, OneOf):
            kind = _one_of(bound.values)
        elif isinstance(bound, Range):
            words, kinds, _ = _WORDS[base]
            upto = f"from {bound.low} to {bound.high}" if bound.high < MOST else f">= {bound.low}"
            kind = _scalar(f"{words} {upto}", kinds, bound.low, bound.high)
    return kind


def _one_of(values: Sequence[object]) -> _Kind:
    def accepts(value: Any) -> bool:
        return isinstance(value, str) and value in values

    words = "one of " + ", ".join(map(repr, values))
    return _Kind(words, accepts, lambda found: all(map(accepts, found)))


def _union(arguments: Sequence[Any]) -> _Kind:
    kinds = [_kind_of(argument) for argument in arguments]
    words = " or ".join(dict.fromkeys(kind.words for kind in kinds))
    if all(argument in _WORDS for argument in arguments):
        most = max(_WORDS[argument][2] for argument in arguments)
        return _scalar(words, set().union(*(_WORDS[argument][1] for argument in arguments)), -most, most)
    def accepts(value: Any) -> bool:
        return any(kind.accepts(value) for kind in kinds)

    return _Kind(words, accepts, lambda values: all(map(accepts, values)))


def _list_of(kind: _Kind) -> _Kind:
    def all_of(values: Iterable[Any]) -> bool:
        found = list(values)
        return set(map(type, found)) <= {list} and kind.all_of(chain.from_iterable(found))

    return _Kind(f"a list, each {kind.words}", lambda value: type(value) is list and kind.all_of(value), all_of)


def _object_of(kind: _Kind) -> _Kind:
    def all_of(values: Iterable[Any]) -> bool:
        found = list(values)
        return set(map(type, found)) <= {dict} and kind.all_of(chain.from_iterable(map(dict.values, found)))

    return _Kind(f"an object, each {kind.words}", lambda value: type(value) is dict and kind.all_of(value.values()), all_of)
