"""Extraction of a text's final answer: the last box after the thinking."""

from __future__ import annotations

import re

from dflash_mcmc.grading.math.characters import trimmed

_OPEN, _CLOSE = "<think>", "</think>"
_BOX = re.compile(r"\\(?:f?boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def after_thinking(text: str) -> str | None:
    """The text after the last `</think>`; the whole text if it has none; None if a `<think>` is not closed."""
    tail = text.rpartition(_CLOSE)[2]
    return None if _OPEN in tail else tail


def last_box(text: str) -> str | None:
    r"""Content of the last balanced `\boxed{...}` or `\fbox{...}` after the thinking; None if there is none.

    The braces are matched in one pass, so that the time is linear in the length even for a text of many unclosed boxes.
    """
    answer = after_thinking(text)
    if answer is None:
        return None
    ends = _matching(answer)
    closed = [match for match in _BOX.finditer(answer) if match.end() - 1 in ends]
    if not closed:
        return None
    return trimmed(answer[closed[-1].end():ends[closed[-1].end() - 1]])


def _matching(text: str) -> dict[int, int]:
    """Positions of matching braces, opening -> closing. Escaped braces do not count."""
    opened, ends = [], {}
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            ends[opened.pop()] = match.start()
    return ends
