"""The text of an override as it was typed, and quotes for texts that Hydra's grammar cannot read."""

from __future__ import annotations

import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from dflash_mcmc.errors import note

_FIELD = re.compile(r"(?P<field>\+{0,2}(?!hydra\.)\w+(?:\.\w+)+)=(?P<text>.*[{}].*)", re.DOTALL)
"""A field of a group with braces in its value, such as `dataset.prompt={question} Answer briefly.`"""


def text_of(override: Override) -> str:
    """The whole override, such as `sampler.alpha=2`. Hydra's parser sets it, though its type allows None."""
    return override.input_line or ""


def given_value(override: Override) -> str:
    """The text after the equals sign."""
    return text_of(override).partition("=")[2]


def quoted(text: str) -> str:
    """A text in quotes, for Hydra's grammar. The grammar reads a backslash as itself, except before a quote."""
    return '"' + re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + ('\\"' if found[2] else ""), text) + '"'


def readable(text: str) -> str:
    """The override as Hydra's grammar can read it. An unreadable value with braces is put in quotes, as one text.

    Any other override is returned unchanged. If the quoted value has a comma, a note explains that it is no sweep.
    """
    found = _FIELD.fullmatch(text)
    if found is None or _is_read(text):
        return text
    if "," in found["text"]:
        note(f"{found['field'].lstrip('+')}: read as one text, {found['text']!r}; a sweep needs quotes around each value")
    return f"{found['field']}={quoted(found['text'])}"


def _is_read(text: str) -> bool:
    try:
        OverridesParser.create().parse_override(text)
    except HydraException:
        return False
    return True
