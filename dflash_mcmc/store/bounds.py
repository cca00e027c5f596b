"""Bounds in the annotations of a record's fields, which `schema.py` checks."""

from __future__ import annotations

from typing import Annotated, NamedTuple

MOST = 2**63 - 1
"""The largest whole number of a line."""


class Range(NamedTuple):
    """In an annotation: the smallest and the largest number."""

    low: int = -MOST
    high: int = MOST


class OneOf(NamedTuple):
    """In an annotation: the allowed texts."""

    values: tuple[str, ...]


class Letters(NamedTuple):
    """In an annotation: the characters that a text consists of."""

    allowed: str


class Long(NamedTuple):
    """In an annotation of a list, a text or an object of lists: what its length is.

    Fields of the same name in an object have equal lengths. If the object, or the one around it, has a whole number of this
    name, it is the length.
    """

    of: str


class Instead(NamedTuple):
    """In an annotation: an object with this field may lack the required fields of these names."""

    names: tuple[str, ...]


Count = Annotated[int, Range(0)]
"""A number of things."""
