"""Declaration of configuration fields: role, default value, meaning and allowed values.

Every field of every component is either `identity` (it can change an output and is part of the run's identity) or `runtime`
(it changes how, where or how much is computed, but no output). A test fails on a field that is neither.
"""

import dataclasses
import functools
import json
import math
import numbers
import os
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

from omegaconf import MISSING as MISSING

from dflash_mcmc.errors import ConfigError, did_you_mean

T = TypeVar("T")
ROLES = ("identity", "runtime")
_WORDS: dict[object, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false",
                             Any: "a word or a list of words", list[str]: "a list of texts (['A','B'])",
                             list[int]: "a list of whole numbers ([1,2])", list[float]: "a list of numbers ([0.5,1])"}


class Spec(NamedTuple):
    """The metadata of a field. Bounds apply to numbers and to every number of a list, `choices` to strings.

    The choices come from the field's type, `Literal["a", "b"]` (`schema_of`).
    """

    role: str
    help: str
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] | None = None
    inverse_of: str = ""
    """The field whose inverse this one takes where it is null. A value that is this inverse is shown as `1/<that field>`,
    because it varies only with it."""
    at_zero: str = ""
    """The override that does what a 0 would mean, for a number whose bounds exclude 0."""
    later: bool = False
    """Whether the identity leaves the field out at its default, as that of runs that are older than the field."""
    no_effect: bool = False
    """Whether the field changes nothing at any value. The points of a sweep over it are one run."""

    def describe(self, field_type: object) -> str:
        """The allowed values in words: `a number > 0`, `one of 'A', 'B'`, `a whole number or null`."""
        inner, optional = _strip_optional(field_type)
        if self.choices:
            return "one of " + ", ".join(repr(choice) for choice in self.choices) + (" or null" if optional else "")
        words = _WORDS.get(inner, "a list")
        each = ", each" if typing.get_origin(inner) is list else ""
        bounds = [f"{sign} {bound:{'d' if isinstance(bound, int) else 'g'}}" for sign, bound in
                  ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le)) if bound is not None]
        zero = f"; in place of 0: {self.at_zero}" if self.at_zero else ""
        return words + (f"{each} " + " and ".join(bounds) if bounds else "") + (" or null" if optional else "") + zero

    def admits(self, value: object) -> bool:
        """Whether a value of the right type is within the bounds or among the choices."""
        if value is None:
            return True
        if isinstance(value, (list, tuple)):
            return all(self.admits(entry) for entry in value)
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True
        return not (
            (isinstance(value, float) and not math.isfinite(value))
            or (self.gt is not None and not value > self.gt) or (self.ge is not None and not value >= self.ge)
            or (self.lt is not None and not value < self.lt) or (self.le is not None and not value <= self.le)
        )


def identity(default: T, help: str, **bounds: Any) -> T:
    """A field that can change an output.

    Args:
        default: the value where none is given; MISSING if one must be given.
        help: its meaning, for users.
        bounds: further values of Spec.
    """
    return _field(default, Spec("identity", help, **bounds))


def runtime(default: T, help: str, **bounds: Any) -> T:
    """A field that changes where, how fast or how much is computed, and no output except by rounding."""
    return _field(default, Spec("runtime", help, **bounds))


def _field(default: Any, spec: Spec) -> Any:
    """A dataclass field. Each object gets a list of its own."""
    if isinstance(default, list):
        return dataclasses.field(default_factory=functools.partial(list, default), metadata={"spec": spec})
    return dataclasses.field(default=default, metadata={"spec": spec})


def default_of(field: dataclasses.Field) -> Any:
    """The value of a field where none is given; MISSING if one must be given."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def shown_default(field: dataclasses.Field) -> str:
    """The default of a field in one line, as a command line takes it: `4.0`, `null`, `[1, 2]`; `needed` if there is none."""
    default = default_of(field)
    if default == MISSING:
        return "needed"
    text = json.dumps(default) if not isinstance(default, str) else default
    return text if text and "\n" not in text else json.dumps(text[:40] + "..." if text else "")


def schema_of(cls: type[T]) -> type[T]:
    """The dataclass as OmegaConf can hold it, which knows no `Literal`: a field's literals become the choices of its Spec.

    The annotation is a plain text from then on. Editors and type checkers read the source, and see the literals.
    """
    bases = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
    for base in reversed(bases):
        schema_of(base)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        # A field that only replaces a default, `max_new_tokens: int = 512`, has the Spec of the base class's field.
        inherited = [base.__dataclass_fields__[field.name] for base in bases if field.name in base.__dataclass_fields__]
        if inherited and not has_spec(field):
            field.metadata = inherited[0].metadata  # type: ignore[misc]
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            schema_of(hint)  # type: ignore[arg-type]
        plain, literals = _without_literals(hint)
        if literals:
            owner = next(base for base in cls.__mro__ if field.name in vars(base).get("__annotations__", {}))
            owner.__annotations__[field.name] = plain
            field.metadata = types.MappingProxyType({"spec": spec_of(field)._replace(choices=literals)})  # type: ignore[misc]
    return cls


def _without_literals(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """A type with `str` in place of its `Literal`, and the literals."""
    inner, optional = _strip_optional(hint)
    if typing.get_origin(inner) is typing.Literal:
        return (str | None if optional else str), typing.get_args(inner)
    if typing.get_origin(inner) is list and typing.get_origin(typing.get_args(inner)[0]) is typing.Literal:
        return list[str], typing.get_args(typing.get_args(inner)[0])
    return hint, ()


def spec_of(field: dataclasses.Field) -> Spec:
    """The Spec of a field that was declared by `identity` or `runtime`."""
    return field.metadata["spec"]


@cache
def specs_of(cls: Any) -> dict[str, Spec]:
    """The Specs of a component's fields by name, in their order."""
    return {field.name: spec_of(field) for field in dataclasses.fields(cls)}


def has_spec(field: dataclasses.Field) -> bool:
    """Whether a field was declared by `identity` or `runtime`. Fields that hold a component or a group have no Spec."""
    return "spec" in field.metadata


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, object, object]]:
    """(dotted name, field, declared type, value) of every leaf field below a component or the whole Config."""
    kind: Any = type(node)  # mypy does not take a class for hashable
    types = types_of(kind)
    for field in dataclasses.fields(node):
        value, name = getattr(node, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from walk(value, name + ".")
        else:
            yield name, field, types[field.name], value


@cache
def types_of(cls: type) -> dict[str, object]:
    """The declared types of a class's fields. A command line asks for them thousands of times."""
    return typing.get_type_hints(cls)


def takes_null(cls: Any, name: str) -> bool:
    """Whether null is a value of a field; elsewhere an identity has null where the field changes nothing."""
    return _strip_optional(types_of(cls).get(name))[1]


def identity_values(node: Any) -> dict[str, object]:
    """The values of the identity fields by dotted name."""
    return {name: value for name, field, _, value in walk(node) if (spec := spec_of(field)).role == "identity"
            and not (spec.later and value == default_of(field))}


def values_of(cls: Any, given: Mapping[str, object], prefix: str) -> dict[str, object]:
    """The given values of fields of a dataclass, each of its type and within its bounds, for its constructor.

    Args:
        given: the values of some fields.
        prefix: what precedes a field's name in errors.

    Raises:
        ConfigError: for an unknown field, a value that is not allowed, and a field that has no value.
    """
    specs, types = specs_of(cls), types_of(cls)
    for name, value in given.items():
        if name not in specs:
            raise ConfigError(f"{prefix}{name}", value, f"a field of {cls.__name__}{did_you_mean(name, specs)}: "
                              f"{', '.join(specs) or 'it has none'}")
    values: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        name, spec, value = field.name, spec_of(field), given.get(field.name, MISSING)
        if name not in given:
            if default_of(field) != MISSING:
                continue
            raise ConfigError(f"{prefix}{name}", "nothing", spec.describe(types[name]))
        try:
            values[name] = value = _converted(value, types[name])
        except TypeError as error:
            raise ConfigError(f"{prefix}{name}", value, spec.describe(types[name])) from error
        if not spec.admits(value):
            raise ConfigError(f"{prefix}{name}", value, spec.describe(types[name]))
    return values


def check_types(cls: Any, recorded: object, prefix: str) -> None:
    """Raises ConfigError for a recorded value whose type is not its field's.

    Null is taken for any field: it has no effect there.
    """
    if not isinstance(recorded, Mapping):
        raise ConfigError(prefix.rstrip("."), recorded, f"the fields of {cls.__name__}")
    for field in dataclasses.fields(cls):
        kind, value = _without_literals(types_of(cls)[field.name])[0], recorded.get(field.name)
        if value is not None and dataclasses.is_dataclass(kind):
            check_types(kind, value, f"{prefix}{field.name}.")
        elif value is not None and _strip_optional(kind)[0] in _WORDS:  # not the types of a user's component
            try:
                _converted(value, kind)
            except TypeError as error:
                raise ConfigError(f"{prefix}{field.name}", value, spec_of(field).describe(kind)) from error


def restored(cls: type[T], values: Mapping[str, object]) -> T:
    """An object of a dataclass with recorded values, which are not checked."""
    bare = object.__new__(cls)
    for name, value in values.items():
        setattr(bare, name, value)
    return bare


def _converted(value: Any, field_type: object) -> object:
    """A value as a field of this type holds it: whole numbers become floats, tuples lists, and paths texts.

    Raises TypeError for a value of another type.
    """
    inner, optional = _strip_optional(field_type)
    if inner is Any or type(value) is inner or (value is None and optional):
        return value
    if typing.get_origin(inner) is list and isinstance(value, (list, tuple)):
        return [_converted(entry, typing.get_args(inner)[0]) for entry in value]
    if inner is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    if inner is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if inner is str and isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    raise TypeError(f"{value!r} is no {inner}")


def check_bounds(node: object, prefix: str = "") -> None:
    """Raises ConfigError for the first field out of its bounds."""
    for name, field, field_type, value in walk(node, prefix):
        if has_spec(field) and not spec_of(field).admits(value):
            raise ConfigError(name, value, spec_of(field).describe(field_type))


@cache
def _strip_optional(field_type: object) -> tuple[object, bool]:
    arguments = typing.get_args(field_type)
    if type(None) in arguments:
        return next(a for a in arguments if a is not type(None)), True
    return field_type, False
