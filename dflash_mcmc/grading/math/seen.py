"""Answers seen as another kind: as words, as a relation, as the tokens that they are made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from dflash_mcmc.grading.math.answers import ORDERED, Answer, Formula, Matrix, Named, Related, Several, Words
from dflash_mcmc.grading.math.brackets import enclosed, split
from dflash_mcmc.grading.math.formulas import Node
from dflash_mcmc.grading.math.syntax import parse
from dflash_mcmc.grading.math.tokens import Token
from dflash_mcmc.grading.math.units import MeasureUnit

_SAYING = re.compile(r"[-+]?\s?\d+(?:[.,:/-]\d+)*|[^\W\d]+|(?<=\w)[-+](?!\w)|[<>=*/^%$]")
"""A hyphen between words says nothing; a sign before a number, or behind a grade, does."""


def said(tokens: Sequence[Token]) -> tuple[str, ...]:
    r"""What tokens say, without braces around a single sign: `\frac{1}{23}` is not `\frac{1}23`."""
    found: list[str] = []
    for token in tokens:
        found.append(token.value)
        if len(found) > 2 and found[-1] == "}" and found[-3] == "{" and not found[-2][1:].isdigit():
            found[-3:] = [found[-2]]
    return tuple(found)


def as_words(answer: Answer) -> str:
    """The words or letters that an answer is, or a list of capital letters; empty where it is something else."""
    if isinstance(answer, Words):
        return answer.text
    if isinstance(answer, Formula) and all(token.kind in ("letter", "word") for token in answer.tokens):
        return "".join(f" {token.value}" if token.kind == "word" or token.spaced else token.value for token in answer.tokens)
    if isinstance(answer, Several) and answer.kind == "list":
        items = [as_words(item) for item in answer.items]
        return ", ".join(items) if all(re.fullmatch(" ?[A-Z]", item) for item in items) else ""
    return ""


def plain(text: str) -> str:
    """Words, numbers and signs of arithmetic, in small letters, without an article before them."""
    return re.sub(r"^(?:the|an|a) (?=\w\w)", "", " ".join(_SAYING.findall(text.lower())))


def is_reals(answer: Answer) -> bool:
    r"""Whether an answer is `(-\infty,\infty)` or `\mathbb{R}`."""
    if isinstance(answer, Several):
        ends = [said(item.tokens) for item in answer.items if isinstance(item, Formula)]
        return answer.kind == "()" and len(ends) == 2 and ends[0] == ("-", r"\infty") and ends[1][-1:] == (r"\infty",)
    return isinstance(answer, Formula) and said(answer.tokens) == (r"\mathbb", "R")


def as_relation(named: Named) -> Related | None:
    """`x = 5` and `x < 5` as relations of two formulas; None for what is neither."""
    name, value = Formula(named.name, MeasureUnit()), named.value
    if isinstance(value, Formula):
        return Related("=", name, value)
    if not isinstance(value, Several) or value.kind not in ORDERED or len(value.items) != 2:
        return None
    low, high = value.items
    if not isinstance(low, Formula) or not isinstance(high, Formula):
        return None
    if said(low.tokens) == ("-", r"\infty"):
        return Related(r"\leq" if value.kind[1] == "]" else "<", name, high)
    if said(high.tokens) == (r"\infty",):
        return Related(r"\leq" if value.kind[0] == "[" else "<", low, name)
    return None


def difference(related: Related) -> Node:
    """The left side minus the right one. Raises NotParsed."""
    return Node("add", (parse(related.left.tokens), Node("negate", (parse(related.right.tokens),))))


def names(items: Sequence[Answer]) -> set[tuple[str, ...]] | None:
    """Names of items that all have one, if there are two or more; else None."""
    found = {said(item.name) for item in items if isinstance(item, Named)}
    return found if len(found) > 1 and all(isinstance(item, Named) for item in items) else None


def by_name(items: Sequence[Answer]) -> Sequence[Answer]:
    """In the order of a tuple: `y = 1, x = 2` is `(2,1)`. Names other than a small letter each stay in the order given."""
    named = names(items) or set()
    letters = all(len(name) == len(name[0]) == 1 and name[0].islower() for name in named)
    if len(named) < len(items) or not letters:
        return items
    return sorted(items, key=lambda item: said(item.name))


def is_set(answer: Answer) -> bool:
    """Whether an answer is in braces: inside of a set `{1}` is not 1."""
    return isinstance(answer, Several) and answer.kind == "set"


def infinite(several: Several) -> bool:
    """Whether one of the items is infinite."""
    return any(isinstance(item, Formula) and item.tokens[-1:] and item.tokens[-1].value == r"\infty" for item in several.items)


def one_by_one(named: Named) -> Answer:
    """`(x,y) = (1,2)` as `x = 1, y = 2`; any other value as it is."""
    name, value = enclosed(named.name), named.value
    parts = split(name[1], lambda token: token.value == ",")[0] if name else []
    if not isinstance(value, Several) or value.kind != "()" or len(parts) != len(value.items):
        return value
    return Several("list", tuple(Named(tuple(part), item) for part, item in zip(parts, value.items, strict=True)))


def multiplied(node: Node, multiplier: int) -> Node:
    """A formula times what the word beside it says."""
    return node if multiplier == 1 else Node("multiply", (node, Node("number", value=Fraction(multiplier))))


def entries(matrix: Matrix) -> list[Answer]:
    """The entries row by row, each times the factor before the matrix."""
    found = [entry for row in matrix.rows for entry in row]
    if not matrix.factor:
        return found
    factor = _bracketed(matrix.factor) if matrix.factor[0].value not in ("+", "-") else matrix.factor
    return [entry._replace(tokens=(*factor, *_bracketed(entry.tokens))) if isinstance(entry, Formula) else entry
            for entry in found]


def _bracketed(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    return (Token("sign", "("), *tokens, Token("sign", ")"))
