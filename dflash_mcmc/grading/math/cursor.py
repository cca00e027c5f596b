"""A cursor over tokens, for parsers."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_mcmc.grading.math.formulas import NotParsed
from dflash_mcmc.grading.math.tokens import Token


class Cursor:
    """The tokens that are not consumed yet, in `left`. Asking for a missing token raises NotParsed."""

    def __init__(self, tokens: Sequence[Token]):
        self.left = list(tokens)

    def next(self) -> str | None:
        """Value of the next token, which is not consumed; None at the end."""
        return self.left[0].value if self.left else None

    def take(self) -> Token:
        """Consumes and returns the next token."""
        if not self.left:
            raise NotParsed("the end")
        return self.left.pop(0)

    def skip(self, value: str) -> bool:
        """Consumes the next token if it has this value. Returns whether it did."""
        if self.next() == value:
            self.take()
            return True
        return False

    def expect(self, value: str) -> None:
        """Consumes the next token, which must have this value."""
        if not self.skip(value):
            raise NotParsed(f"no {value}")

    def raw(self, brackets: bool = False) -> str:
        """Consumes a group in braces, or one token, and returns its values unparsed, joined by spaces.

        With `brackets`, a group in parentheses is accepted too, and the result is put in parentheses.
        """
        token = self.take()
        pair = {"{": "}", "(": ")"}.get(token.value) if token.value == "{" or brackets else None
        if pair is None:
            return token.value
        depth, inside = 1, []
        while depth:
            inside.append(self.take().value)
            depth += {token.value: 1, pair: -1}.get(inside[-1], 0)
        return f"({' '.join(inside[:-1])})" if brackets else " ".join(inside[:-1])
