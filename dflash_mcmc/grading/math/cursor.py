"""Tokens that are taken one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_mcmc.grading.math.formulas import NotParsed
from dflash_mcmc.grading.math.tokens import Token


class Cursor:
    """What is left of some tokens. What is asked for and is not there raises NotParsed."""

    def __init__(self, tokens: Sequence[Token]):
        self.left = list(tokens)

    def next(self) -> str | None:
        """Value of the next token; None at the end."""
        return self.left[0].value if self.left else None

    def take(self) -> Token:
        """The next token."""
        if not self.left:
            raise NotParsed("the end")
        return self.left.pop(0)

    def skip(self, value: str) -> bool:
        """Takes the next token if it has this value; whether it had."""
        if self.next() == value:
            self.take()
            return True
        return False

    def expect(self, value: str) -> None:
        """Takes the next token, which has this value."""
        if not self.skip(value):
            raise NotParsed(f"no {value}")

    def raw(self, brackets: bool = False) -> str:
        """The tokens of a group as they stand, or one token."""
        token = self.take()
        pair = {"{": "}", "(": ")"}.get(token.value) if token.value == "{" or brackets else None
        if pair is None:
            return token.value
        depth, inside = 1, []
        while depth:
            inside.append(self.take().value)
            depth += {token.value: 1, pair: -1}.get(inside[-1], 0)
        return f"({' '.join(inside[:-1])})" if brackets else " ".join(inside[:-1])
