r"""TeX's infix commands, `{1 \over 3}` and `{n \choose 2}`, rewritten as the prefix commands `\frac` and `\binom`."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_mcmc.grading.math.brackets import CLOSING, OPENING, split
from dflash_mcmc.grading.math.tokens import Token

_PREFIXED = {r"\over": r"\frac", r"\choose": r"\binom"}


def prefixed(tokens: Sequence[Token]) -> list[Token]:
    r"""The tokens with `\frac{1}{3}` instead of `{1 \over 3}`. An infix command that is not alone in its braces is kept."""
    tokens = list(tokens)
    for place in [place for place, token in enumerate(tokens) if token.value in _PREFIXED]:
        start, end = _edge(tokens, place, -1), _edge(tokens, place, 1)
        if start is None or end is None:
            continue
        parts, infix = split(tokens[start + 1:end], lambda token: token.value in _PREFIXED)
        if len(infix) == 1:
            command = Token("command", _PREFIXED[infix[0].value], tokens[start].spaced)
            return prefixed([*tokens[:start], command, *_group(parts[0]), *_group(parts[1]), *tokens[end + 1:]])
    return tokens


def _edge(tokens: Sequence[Token], place: int, step: int) -> int | None:
    """Position of the brace that opens (`step` -1) or closes (`step` 1) the group around a place; None for other brackets."""
    opening, closing = (OPENING, CLOSING) if step > 0 else (CLOSING, OPENING)
    depth, place = 0, place + step
    while 0 <= place < len(tokens):
        value = tokens[place].value
        if value in closing and depth == 0:
            return place if value in ("{", "}") else None
        depth += (value in opening) - (value in closing)
        place += step
    return None


def _group(tokens: Sequence[Token]) -> list[Token]:
    return [Token("sign", "{"), *tokens, Token("sign", "}")]
