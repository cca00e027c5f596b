"""Checks of stop strings, before any model is loaded. `engine/batching/stop_strings.py` finds them."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_mcmc.errors import ConfigError, note

MOST, LONGEST = 16, 128
"""Largest number of stop strings, and their largest length in characters."""


def given(strings: Sequence[str], field: str) -> list[str]:
    """The strings as a list. Raises ConfigError for one string alone, and for what is no text."""
    if isinstance(strings, (str, bytes)) or not all(isinstance(string, str) for string in strings):
        raise ConfigError(field, strings, "a list of texts")
    check(strings, field)
    return list(strings)


def check(strings: Sequence[str], field: str) -> None:
    """Checks stop strings. Raises ConfigError."""
    if len(strings) > MOST:
        raise ConfigError(field, f"{len(strings)} strings", f"at most {MOST}")
    for string in strings:
        if not string:
            raise ConfigError(field, "", "texts of at least one character, since every text contains the empty one")
        if len(string) > LONGEST:
            raise ConfigError(field, f"a text of {len(string)} characters", f"at most {LONGEST} characters each")
        if "\ufffd" in string or any("\ud800" <= character <= "\udfff" for character in string):
            raise ConfigError(field, string, "texts of whole characters, without U+FFFD and lone surrogates")


def warn(strings: Sequence[str], field: str) -> None:
    """Prints a line for a backslash and an n at the start of a word, which a shell or a file may have meant as a line feed."""
    for string in strings:
        if any(string.startswith("\\n", place) and not string[place + 2:place + 3].islower() for place in range(len(string))):
            note(f"{field}: {string!r} has a backslash and an n; for a line feed write $'{field}=[\"\\nQuestion:\"]' in bash")
