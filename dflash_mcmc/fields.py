"""Declaration of configuration fields: role, meaning and allowed values. Values are in `conf/`.

Every field of every component is either `identity` (it can change an output and is part of the run's identity) or `runtime`
(it changes how, where or how much is computed, but no output). A test fails on a field that is neither.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from omegaconf import MISSING

from dflash_mcmc.errors import ConfigError

ROLES = ("identity", "runtime")
_WORDS: dict[object, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false",
                             Any: "a word or a list of words", list[str]: "a list of texts (['A','B'])",
                             list[int]: "a list of whole numbers ([1,2])", list[float]: "a list of numbers ([0.5,1])"}
_NEVER = object()


class Spec(NamedTuple):
    """The metadata of a field. Bounds apply to numbers and to every number of a list, `choices` to strings."""

    role: str
    help: str
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] | None = None
    off: object = _NEVER
    """The value at which the field changes nothing. The identity leaves out a field with this value, so a new field does not
    change the identity of older runs."""
    no_effect: bool = False
    """Whether the field changes nothing at any value. The points of a sweep over it are one run."""

    def describe(self, field_type: object) -> str:
        """The allowed values in words: `a number > 0`, `one of 'A', 'B'`, `a whole number or null`."""
        inner, optional = _strip_optional(field_type)
        if self.choices:
            return "one of " + ", ".join(repr(choice) for choice in self.choices) + (" or null" if optional else "")
        words = _WORDS.get(inner, "a list")
        each = ", each" if typing.get_origin(inner) is list else ""
        bounds = [f"{sign} {bound:g}" for sign, bound in
                  ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le)) if bound is not None]
        return words + (f"{each} " + " and ".join(bounds) if bounds else "") + (" or null" if optional else "")

    def in_older_runs(self) -> object:
        """The value in runs that were made before the field was added; None if it was there from the start."""
        return None if self.off is _NEVER else self.off

    def is_off(self, value: object) -> bool:
        """Whether the field has the value at which it changes nothing."""
        return self.off is not _NEVER and value == self.off

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


def identity(help: str, **bounds: Any) -> Any:
    """A field that can change an output. A field that is added to a released component has `off=`: see Spec."""
    return dataclasses.field(default=MISSING, metadata={"spec": Spec("identity", help, **bounds)})


def runtime(help: str, **bounds: Any) -> Any:
    """A field that changes where, how fast or how much is computed, and no output except by rounding."""
    return dataclasses.field(default=MISSING, metadata={"spec": Spec("runtime", help, **bounds)})


def spec_of(field: dataclasses.Field) -> Spec:
    """The Spec of a field that was declared by `identity` or `runtime`."""
    return field.metadata["spec"]


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


def identity_values(node: Any) -> dict[str, object]:
    """The values of the identity fields by dotted name, without fields at their `off` value."""
    return {name: value for name, field, _, value in walk(node)
            if spec_of(field).role == "identity" and not spec_of(field).is_off(value)}


def check_bounds(node: object, prefix: str = "") -> None:
    """Raises ConfigError for the first field out of its bounds."""
    for name, field, field_type, value in walk(node, prefix):
        if has_spec(field) and not spec_of(field).admits(value):
            raise ConfigError(name, value, spec_of(field).describe(field_type))


def _strip_optional(field_type: object) -> tuple[object, bool]:
    arguments = typing.get_args(field_type)
    if type(None) in arguments:
        return next(a for a in arguments if a is not type(None)), True
    return field_type, False
