"""Errors that are the user's to mend: each is one line, and none shows a traceback unless it is asked for."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from functools import cache


class UserError(Exception):
    """One line that says what is wrong and what would be right. The process ends with exit code 2."""


class ConfigError(UserError):
    """A field of the configuration: which, what was given, what is allowed."""

    def __init__(self, field: str, given: object, allowed: str):
        super().__init__(f"{field}: given {_shorten(given)}; allowed: {allowed}")


class RunBusy(UserError):
    """Another process is writing this run folder."""


@cache
def note(text: str) -> None:
    """One line for the user on stderr, once, from the first process of a launch: what is not wrong but worth knowing."""
    if not int(os.environ.get("RANK", 0)):
        print(text, file=sys.stderr)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'alpha'?)`, or nothing where nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _shorten(given: object) -> str:
    text = given if isinstance(given, str) and given.startswith("nothing") else repr(given)
    return text if len(text) <= 120 else text[:117] + "..."
