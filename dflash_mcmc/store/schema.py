"""The schema of a file's lines, made from the annotations of a TypedDict.

    class Sample(TypedDict):
        chain: Count
        verdict: Annotated[str, OneOf(("correct", "wrong"))]
        level: int | None
        measures: NotRequired[dict[str, float]]

    Schema(Sample).fault({"chain": True, "verdict": "correct", "level": None})
    # "chain: given True; allowed: a whole number from 0 to 9223372036854775807"

A JSON `true` is no number. A whole number counts as a float, as in annotations. Keys that the TypedDict does not have are
allowed: a newer version may have added them. A field may hold objects of another TypedDict, alone, in lists or in objects. The
field of an error is then a path: `cells[2].trace.cut`.
"""

from __future__ import annotations

import math
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

from dflash_mcmc.store.bounds import MOST, Instead, Letters, Long, OneOf, Range

_LARGEST = math.nextafter(math.inf, 0.0)
_DEEPEST = 32
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring = 2, 60
Fault = tuple[str, str]
"""Where a value is wrong, as a path, and how: `given X; allowed: Y`."""


class _Kind(NamedTuple):
    """The allowed values of a field."""

    words: str
    """The allowed values in words."""
    accepts: Callable[[Any], bool]
    all_of: Callable[[Iterable[Any]], bool]
    """Whether every value of a list is allowed. Faster than `accepts` for each."""
    inside: Callable[[Any, Mapping[str, int]], Fault | None] | None = None
    """What is wrong in a value that holds objects with fields of their own; None for values that hold none.

    It takes the lengths that `Long` knows around the value, by name.
    """

    def fault(self, value: object, lengths: Mapping[str, int]) -> Fault | None:
        """What is wrong with a value."""
        if self.inside is not None:
            return self.inside(value, lengths)
        return None if self.accepts(value) else ("", f"given {shown(value)}; allowed: {self.words}")


class Schema:
    """The fields of an object with their types.

    Args:
        fields: TypedDicts; a field of a later one replaces that of an earlier one. `Range`, `OneOf`, `Letters`, `Long` and
            `Instead` in their annotations are bounds.
        may_lack: required keys that older versions do not write.
        alone: keys beside which the other required keys may be absent: `failure` in the record of a probe.
        key: keys that are required always.
    """

    def __init__(self, *fields: type, may_lack: Iterable[str] = (), alone: Iterable[str] = (), key: Iterable[str] = ()):
        hints = {name: hint for each in fields for name, hint in typing.get_type_hints(each, include_extras=True).items()}
        self._kinds = {name: _kind_of(hint) for name, hint in hints.items()}
        self._required = frozenset(name for name, hint in hints.items()
                                   if typing.get_origin(hint) is not NotRequired) - frozenset(may_lack)
        self._instead = dict.fromkeys(alone, self._required - frozenset(key))
        self._long: dict[str, str] = {}
        for name, bound in ((name, bound) for name, hint in hints.items() for bound in _bounds_of(hint)):
            if isinstance(bound, Long):
                self._long[name] = bound.of
            elif isinstance(bound, Instead):
                self._instead[name] = frozenset(bound.names)
        self._is_deep = bool(self._long) or any(kind.inside for kind in self._kinds.values())

    def fault(self, value: object) -> str | None:
        """What is wrong with a value: `field: given X; allowed: Y`; None if it has the schema."""
        if (found := self.inside(value, {})) is None:
            return None
        return f"{found[0] or 'line'}: {found[1]}"

    def inside(self, value: object, lengths: Mapping[str, int]) -> Fault | None:
        """What is wrong with a value. Args: lengths: those that `Long` knows around the value, by name."""
        if not isinstance(value, dict):
            return "", f"given {shown(value)}; allowed: an object"
        if self._is_deep:
            lengths = self._lengths(value, lengths)
        lacking = self._instead.keys() & value.keys()
        for name in sorted(self._required.difference(value.keys(), *(self._instead[each] for each in lacking))):
            return name, f"given nothing; allowed: {self._kinds[name].words}"
        for name, given in value.items():
            if found := self._kinds.get(name, _ANYTHING).fault(given, lengths):
                return shown(name)[1:-1] + _joined(found[0]), found[1]
        return self._other_length(value, lengths)

    def _lengths(self, value: dict, around: Mapping[str, int]) -> dict[str, int]:
        """The lengths in an object: its whole numbers, or else what is stated around it, or else its first lists' lengths."""
        of_lists = {of: len(each) for name, of in reversed(self._long.items()) for _, each in _lists(value.get(name))}
        return {**of_lists, **around, **{name: each for name, each in value.items() if type(each) is int}}

    def _other_length(self, value: dict, lengths: Mapping[str, int]) -> Fault | None:
        for name, of in self._long.items():
            for path, each in _lists(value.get(name)):
                if len(each) != lengths[of]:
                    return name + path, f"given {len(each)} values; allowed: {lengths[of]} ({of})"
        return None


def _lists(value: object) -> Iterator[tuple[str, list | str]]:
    """The lists and texts in the value of a field with `Long`, each with its path."""
    if isinstance(value, dict):
        yield from ((_joined(shown(name)[1:-1]), each) for name, each in value.items() if isinstance(each, (list, str)))
    elif isinstance(value, (list, str)):
        yield "", value


def _joined(path: str) -> str:
    """A path after the field that has it."""
    return path if path[:1] in ("", "[") else f".{path}"


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
    if typing.is_typeddict(hint):
        return _fields_of(hint)
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
    if origin is tuple:
        return _values_of(list(map(_kind_of, arguments)))
    if origin is dict:  # in Python true is a whole number, so an object of whole numbers may have it
        of = arguments[1]
        return _object_of(_kind_of(of | bool if int in (of, *typing.get_args(of)) else of))
    raise TypeError(f"{hint}: has no JSON values")


def _bounds_of(hint: Any) -> tuple[object, ...]:
    """The bounds in the annotation of a field."""
    if typing.get_origin(hint) is NotRequired:
        return _bounds_of(typing.get_args(hint)[0])
    return typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()


def _bounded(kind: _Kind, base: object, bounds: Sequence[object]) -> _Kind:
    for bound in bounds:
        if isinstance(bound, OneOf):
            kind = _one_of(bound.values)
        elif isinstance(bound, Letters):
            kind = _letters(bound.allowed)
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


def _letters(allowed: str) -> _Kind:
    def accepts(value: Any) -> bool:
        return isinstance(value, str) and set(value) <= set(allowed)

    return _Kind(f"a text of the letters {allowed}", accepts, lambda found: all(map(accepts, found)))


def _union(arguments: Sequence[Any]) -> _Kind:
    kinds = [_kind_of(argument) for argument in arguments]
    words = " or ".join(dict.fromkeys(kind.words for kind in kinds))
    if all(argument in _WORDS for argument in arguments):
        most = max(_WORDS[argument][2] for argument in arguments)
        return _scalar(words, set().union(*(_WORDS[argument][1] for argument in arguments)), -most, most)
    def accepts(value: Any) -> bool:
        return any(kind.accepts(value) for kind in kinds)

    return _Kind(words, accepts, lambda values: all(map(accepts, values)))


def _fields_of(hint: type) -> _Kind:
    """Objects with the fields of a TypedDict."""
    schema = Schema(hint)

    def accepts(value: Any) -> bool:
        return schema.inside(value, {}) is None

    return _Kind("an object", accepts, lambda values: all(map(accepts, values)), schema.inside)


def _values_of(kinds: Sequence[_Kind]) -> _Kind:
    """Lists with a value of each kind, in order."""
    def accepts(value: Any) -> bool:
        return type(value) is list and len(value) == len(kinds) and all(
            kind.accepts(each) for kind, each in zip(kinds, value, strict=True))

    words = f"a list of {len(kinds)}: " + ", ".join(dict.fromkeys(kind.words for kind in kinds))
    return _Kind(words, accepts, lambda values: all(map(accepts, values)))


def _list_of(kind: _Kind) -> _Kind:
    def all_of(values: Iterable[Any]) -> bool:
        found = list(values)
        return set(map(type, found)) <= {list} and kind.all_of(chain.from_iterable(found))

    def inside(value: Any, lengths: Mapping[str, int]) -> Fault | None:
        if type(value) is not list:
            return "", f"given {shown(value)}; allowed: {words}"
        return _first((f"[{number}]", kind.fault(each, lengths)) for number, each in enumerate(value))

    words = f"a list, each {kind.words}"
    return _Kind(words, lambda value: type(value) is list and kind.all_of(value), all_of, kind.inside and inside)


def _object_of(kind: _Kind) -> _Kind:
    def all_of(values: Iterable[Any]) -> bool:
        found = list(values)
        return set(map(type, found)) <= {dict} and kind.all_of(chain.from_iterable(map(dict.values, found)))

    def inside(value: Any, lengths: Mapping[str, int]) -> Fault | None:
        if type(value) is not dict:
            return "", f"given {shown(value)}; allowed: {words}"
        return _first((shown(name)[1:-1], kind.fault(each, lengths)) for name, each in value.items())

    words = f"an object, each {kind.words}"
    return _Kind(words, lambda value: type(value) is dict and kind.all_of(value.values()), all_of, kind.inside and inside)


def _first(faults: Iterable[tuple[str, Fault | None]]) -> Fault | None:
    """The first fault of the values in another value, with its path there."""
    return next(((name + _joined(found[0]), found[1]) for name, found in faults if found), None)
