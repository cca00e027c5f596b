"""Brackets in a list of tokens: nesting depth, splitting outside brackets, and the content of a pair of brackets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_mcmc.grading.math.tokens import Token

OPENING = {"(": "()", "[": "[]", "{": "{}", r"\{": r"\{\}", r"\langle": "<>", r"\lfloor": "floor", r"\lceil": "ceil"}
CLOSING = {")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"}


FACING = "facing"
"""Token kind of a bracket that `facing` has turned around. It bounds an interval, never a point."""
_BEFORE = ("", r"\in", r"\cup", r"\cap", "=", ",", "or", "and")
_AFTER = ("", r"\cup", r"\cap", ",", ".", "or", "and")


def facing(tokens: Sequence[Token]) -> list[Token]:
    """The tokens with the intervals `]0,1[` and `[0,1[` rewritten as `(0,1)` and `[0,1)`."""
    values = ["", *(token.value for token in tokens), ""]
    turned = []
    for token, before, after in zip(tokens, values, values[2:], strict=False):
        opens, closes = token.value == "]" and before in _BEFORE, token.value == "[" and after in _AFTER
        turned.append(Token(FACING, "(" if opens else ")", token.spaced) if opens or closes else token)
    return turned


def depths(tokens: Sequence[Token]) -> list[int]:
    """Nesting depth of each token in brackets and environments. A bracket has the depth of its content.

    Unmatched closing brackets do not make the depth negative.
    """
    found, depth = [], 0
    for token in tokens:
        opens = token.value in OPENING or token.kind == "begin"
        closes = token.value in CLOSING or token.kind == "end"
        depth += opens
        found.append(depth)
        depth = max(0, depth - closes)
    return found


def split(tokens: Sequence[Token], separates: Callable[[Token], bool]) -> tuple[list[list[Token]], list[Token]]:
    """(parts, separators): the tokens split at each separator outside brackets."""
    parts: list[list[Token]] = [[]]
    separators: list[Token] = []
    for token, depth in zip(tokens, depths(tokens), strict=True):
        if depth == 0 and separates(token):
            parts.append([])
            separators.append(token)
        else:
            parts[-1].append(token)
    return parts, separators


def enclosed(tokens: Sequence[Token]) -> tuple[str, list[Token]] | None:
    """(brackets, content) if one pair of brackets encloses all tokens, otherwise None. `[0,1)` is also a pair."""
    if len(tokens) < 2:
        return None
    first, last = tokens[0].value, tokens[-1].value
    if first not in OPENING or last not in CLOSING:
        return None
    inside = depths(tokens)
    if inside[-1] != 1 or min(inside) < 1:
        return None
    if any(before == 1 and token.value in CLOSING for token, before in zip(tokens[:-1], inside[:-1], strict=True)):
        return None
    kind = OPENING[first]
    if first in ("(", "[") and last in (")", "]"):
        kind = first + last
    elif {first: last} not in ({"{": "}"}, {r"\{": r"\}"}, {r"\langle": r"\rangle"}):
        return None
    return kind, list(tokens[1:-1])
