"""Where a text's final answer stands: behind the thinking, in the last box."""

from __future__ import annotations

import re

from dflash_mcmc.grading.math.characters import trimmed

_OPEN, _CLOSE = "<think>", "</think>"
_BOX = re.compile(r"\\(?:f?boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def behind_thinking(text: str) -> str | None:
    """What follows the last `</think>`; the whole text where nobody thinks; None where the thinking does not end."""
    tail = text.rpartition(_CLOSE)[2]
    return None if _OPEN in tail else tail


def last_box(text: str) -> str | None:
    r"""Content of the last balanced `\boxed{...}` or `\fbox{...}` behind the thinking; None where there is none.

    One pass over the braces, so that a text of nothing but open boxes takes no longer than another one.
    """
    answer = behind_thinking(text)
    if answer is None:
        return None
    ends = _matching(answer)
    closed = [match for match in _BOX.finditer(answer) if match.end() - 1 in ends]
    if not closed:
        return None
    return trimmed(answer[closed[-1].end():ends[closed[-1].end() - 1]])


def _matching(text: str) -> dict[int, int]:
    """Place of each closed brace's open one -> place of its end. An escaped brace is a character."""
    opened, ends = [], {}
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            ends[opened.pop()] = match.start()
    return ends
