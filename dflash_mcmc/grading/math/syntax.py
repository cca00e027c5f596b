"""Formulas: their tree, exact values of numbers, and the parser from tokens to a tree. It has its own grammar, so that no part
of an answer is ignored.

It raises NotParsed for anything that the grammar does not have, e.g. words, an unknown command or a misplaced index. Such
answers are compared token by token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from dflash_mcmc.grading.math.tokens import Token
from dflash_mcmc.grading.math.words import FUNCTIONS
from dflash_mcmc.grading.verdicts import MAX_EXPONENT, Unsupported


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


class NotParsed(Exception):
    """The tokens are not an expression of the grammar. The message names the token that is unexpected or missing."""


class Node(NamedTuple):
    """A formula. `kind` is number, symbol, constant, add, multiply, divide, power, root, negate, call, absolute, factorial,
    binomial, degrees, floor, ceil.
    """

    kind: str
    parts: tuple[Node, ...] = ()
    value: Fraction | str | None = None
    """The value of a number, the index of a root, or the name of a symbol, constant (pi, e, i, oo) or function."""

    @property
    def number(self) -> Fraction:
        """`value` of a number or a root."""
        if not isinstance(self.value, Fraction):
            raise TypeError(f"a {self.kind} has no number")
        return self.value

    @property
    def name(self) -> str:
        """`value` of a symbol, constant or function."""
        if not isinstance(self.value, str):
            raise TypeError(f"a {self.kind} has no name")
        return self.value


def decimal(text: str) -> Fraction:
    """Exact value of a `number` token. Raises Unsupported for an exponent beyond the limit."""
    mantissa, _, exponent = text.partition("e")
    if abs(int(exponent or 0)) > MAX_EXPONENT:
        raise Unsupported("exponent")
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def repeating(text: str) -> Fraction:
    """Exact value of a `repeating` token, `whole.fixed(period)`."""
    whole, _, rest = text.partition(".")
    fixed, _, period = rest.rstrip(")").partition("(")
    return Fraction(f"{whole}.{fixed or 0}") + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))


_LETTERS = re.compile(r"\\(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|upsilon"
                      r"|phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega|ell|hbar)")
_CALLS = frozenset(f"\\{name}" for name in FUNCTIONS)
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_ROUNDINGS = {r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_OPERATORS = {"\\sum", "\\prod", "\\coprod", "\\int", "\\iint", "\\oint", "\\lim", "\\limsup", "\\liminf"}
_APPLIED = frozenset("fghFGHP")
"""Letters that are read as functions if parentheses follow."""


@lru_cache(maxsize=1024)
def parse(tokens: tuple[Token, ...]) -> Node:
    """Parses all tokens as one formula. Raises NotParsed if that is impossible, and Unsupported beyond the limits."""
    parser = _FormulaParser(tokens)
    try:
        node = parser.sum()
    except RecursionError as error:  # `check_size` does not count repeated signs and bars
        raise Unsupported("nesting") from error
    if parser.left:
        raise NotParsed(f"{parser.left[0].value} after the end")
    return node


class _FormulaParser(Cursor):
    """Recursive descent. `check_size` bounds the nesting of brackets."""

    def sum(self) -> Node:
        node = self._signed()
        while self.next() in ("+", "-"):
            minus = self.take().value == "-"
            term = self._signed()
            node = Node("add", (node, Node("negate", (term,)) if minus else term))
        return node

    def _signed(self) -> Node:
        if self.next() in ("+", "-"):
            minus = self.take().value == "-"
            node = self._signed()
            return Node("negate", (node,)) if minus else node
        return self._product()

    def _product(self) -> Node:
        node = self._mixed() or self._power()
        while True:
            if self.next() in (r"\cdot", "/"):
                kind = "divide" if self.take().value == "/" else "multiply"
                factor = Node("negate", (self._power(),)) if self.skip("-") else self._power()
                node = Node(kind, (node, factor))
            elif self._begins_factor(after=node):
                node = Node("multiply", (node, self._power()))
            else:
                return node

    def _mixed(self) -> Node | None:
        r"""A mixed number, `1\frac{4}{5}` or `1 4/5`, that is, a whole number followed by a proper fraction; else None."""
        if len(self.left) < 3 or self.left[0].kind != "number" or not self.left[0].value.isdigit():
            return None
        whole, saved = Fraction(self.left[0].value), self.left
        if self.left[1].value == r"\frac":
            self.left = self.left[2:]
            over, under = self._argument(), self._argument()
        elif ([token.kind for token in self.left[1:4]] == ["number", "sign", "number"] and self.left[1].spaced
              and self.left[2].value == "/"):
            over, under = (Node("number", value=decimal(self.left[index].value)) for index in (1, 3))
            self.left = self.left[4:]
        else:
            return None
        integers = [node.number for node in (over, under) if node.kind == "number" and node.number.denominator == 1]
        if len(integers) == 2 and 0 < integers[0] < integers[1] and self.next() != "^":
            return Node("number", value=whole + integers[0] / integers[1])
        self.left = saved
        return None

    def _begins_factor(self, after: Node) -> bool:
        if not self.left:
            return False
        token = self.left[0]
        if token.kind in ("number", "repeating"):
            return after.kind not in ("number", "symbol", "constant")
        if token.kind in ("letter", "command"):
            return token.value not in (r"\cdot", r"\pm", r"\mp", *_ROUNDINGS.values())
        return token.value in ("(", "[", "{") or (token.value == "|" and not self._open_bars)

    _open_bars = 0
    """Number of `|` that are open in the current brackets."""

    def _power(self) -> Node:
        node = self._base()
        while self.left:
            if self.skip("!"):
                if node.kind not in ("number", "symbol"):
                    raise Unsupported("factorial")
                node = Node("factorial", (node,))
            elif self.skip("%"):
                node = Node("divide", (node, Node("number", value=Fraction(100))))
            elif self.skip(r"\degree"):
                node = Node("degrees", (node,))
            elif self.skip("^"):
                node = Node("power", (node, self._argument(digits=False)))
                if self.next() == "^":
                    raise Unsupported("power of a power")
            else:
                return node
        return node

    def _base(self) -> Node:
        if not self.left:
            raise NotParsed("the end")
        token = self.take()
        if token.kind == "number":
            return Node("number", value=decimal(token.value))
        if token.kind == "repeating":
            return Node("number", value=repeating(token.value))
        if token.kind == "letter" or (token.kind == "word" and len(token.value) == 1):
            return self._symbol(token.value)
        if token.value in _BRACKETS:
            return self._bracketed(_BRACKETS[token.value])
        if token.value == "|":
            return self._absolute()
        if token.kind == "command":
            return self._command(token.value)
        raise NotParsed(token.value)

    def _bracketed(self, closing: str) -> Node:
        bars, self._open_bars = self._open_bars, 0
        node = self.sum()
        self.expect(closing)
        self._open_bars = bars
        return node

    def _absolute(self) -> Node:
        self._open_bars += 1
        node = self.sum()
        self.expect("|")
        self._open_bars -= 1
        return Node("absolute", (node,))

    def _symbol(self, name: str) -> Node:
        if name in ("e", "i") and self.next() not in ("_", "'"):
            return Node("constant", value=name)
        if self.skip("_"):
            name += f"_{self.raw()}"
        while self.next() == "'":
            name += self.take().value
        if self.next() == "(" and (name[0] in _APPLIED or self._number_in_parentheses_follows()):
            name += self.raw(brackets=True)
        return Node("symbol", value=name)

    def _number_in_parentheses_follows(self) -> bool:
        """Whether a number in parentheses follows, as in `x(2)`, which is the value of a function."""
        return len(self.left) > 2 and self.left[1].kind == "number" and self.left[2].value == ")"

    def _command(self, name: str) -> Node:
        if name in _OPERATORS:
            raise Unsupported(name[1:])
        if name in _CALLS:
            return self._call(name[1:])
        if name == r"\frac":
            return Node("divide", (self._argument(), self._argument()))
        if name == r"\sqrt":
            return self._root()
        if name == r"\binom":
            return Node("binomial", (self._argument(), self._argument()))
        if name in _ROUNDINGS:
            return Node(name[2:], (self._bracketed(_ROUNDINGS[name]),))
        if name == r"\pi":
            return Node("constant", value="pi")
        if name == r"\infty":
            return Node("constant", value="oo")
        if _LETTERS.fullmatch(name):
            return self._symbol(name)
        raise NotParsed(name)

    def _root(self) -> Node:
        """A root. An odd root of a negative number is the real root, as answers mean it; not the complex principal root."""
        index = Fraction(2)
        if self.skip("["):
            node = self._bracketed("]")
            if node.kind != "number" or node.number.denominator != 1 or not 0 < node.number <= 100:
                raise NotParsed("the index of a root")
            index = node.number
        if self.left and self.left[0].kind == "number" and len(self.left[0].value) > 1:
            raise NotParsed(f"a root of {self.left[0].value} without braces")
        radicand = self._argument()
        if index % 2 == 1 and radicand.kind == "negate":
            return Node("negate", (Node("root", radicand.parts, index),))
        return Node("root", (radicand,), index)

    def _call(self, name: str) -> Node:
        base = exponent = None
        if name == "log" and self.skip("_"):
            base = self._argument(digits=False)
        if self.skip("^"):
            exponent = self._argument(digits=False)
        opened = self.next() in _BRACKETS
        argument = self._bracketed(_BRACKETS[self.take().value]) if opened else self._signed_argument()
        if exponent == Node("negate", (Node("number", value=Fraction(1)),)):
            if name not in _INVERSES:
                raise NotParsed(f"{name}^-1")
            name, exponent = _INVERSES[name], None
        if name == "exp":
            node = Node("power", (Node("constant", value="e"), argument))
        elif name == "log":
            node = Node("call", (argument, base or Node("number", value=Fraction(10))), "log")
        else:
            node = Node("call", (argument,), name)
        return Node("power", (node, exponent)) if exponent else node

    def _signed_argument(self) -> Node:
        """The argument of a function without brackets, e.g. `2x` in `\\sin 2x\\cos x`."""
        if self.skip("-"):
            return Node("negate", (self._signed_argument(),))
        node = self._mixed() or self._power()
        while self._begins_factor(after=node) and self.next() not in (*_CALLS, "(", "["):
            node = Node("multiply", (node, self._power()))
        return node

    def _argument(self, digits: bool = True) -> Node:
        """The argument of a command: a group, a letter, or a command with its own arguments.

        With `digits`, only the first digit of a number is taken, as in TeX; otherwise the whole number.
        """
        if not self.left:
            raise NotParsed("the end")
        token = self.left[0]
        if token.value in ("{", "("):
            self.take()
            return self._bracketed(_BRACKETS[token.value])
        if token.kind == "number" and digits:
            return self._digit()
        if not digits and self.skip("-"):
            return Node("negate", (self._argument(digits=False),))
        return self._base()

    def _digit(self) -> Node:
        token = self.take()
        if not token.value.isdigit():
            raise NotParsed(f"{token.value} without braces")
        if len(token.value) > 1:
            self.left.insert(0, Token("number", token.value[1:]))
        return Node("number", value=Fraction(token.value[0]))
