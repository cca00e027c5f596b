"""The kinds of answers, their units, and views of an answer as another kind: words, a relation, values of tokens.

Units beside a number are money, percent, degrees and others; words such as `million` are part of the number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, Union

from dflash_mcmc.grading.math.syntax import Node, parse
from dflash_mcmc.grading.math.tokens import Token, enclosed, split
from dflash_mcmc.grading.math.words import MEANINGFUL, MULTIPLIERS, SEPARATORS, is_number_word, is_symbol, singular, unit_of

_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "¢": "cent", r"\pounds": "pound sterling",
               r"\euro": "euro"}
_TRIGONOMETRIC = {rf"\{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
PERCENT, DEGREE = "percent", "degree"


class MeasureUnit(NamedTuple):
    """A unit of measurement, to the power `exponent`. `name` is empty if an answer has no unit."""

    name: str = ""
    exponent: int = 1

    def fits(self, other: MeasureUnit) -> bool:
        """Whether two answers with these units can be equal: the units are the same, or one answer leaves its unit out.

        A plain `degree` also fits `degree c` and `degree f`.
        """
        if not self.name or not other.name or self == other:
            return True
        degrees = {self.name, other.name}
        return DEGREE in degrees and all(name.startswith(DEGREE) for name in degrees)


def measured(tokens: Sequence[Token]) -> Formula:
    """Separates the unit from an answer. If no number would remain, the tokens are returned unchanged, without a unit."""
    core, unit, multiplier = list(tokens), MeasureUnit(), 1
    core, money = _without_currency(core)
    while core:
        end = _phrase_start(core)
        if core[-1].value == "%" and unit.name != PERCENT:
            core, trailing = core[:-1], MeasureUnit(PERCENT)
        elif core[-1].value == r"\degree" and unit.name != DEGREE and not any(token.value in _TRIGONOMETRIC for token in core):
            core, trailing = core[:-1], MeasureUnit(DEGREE)
        elif len(core) > 2 and core[-2].value == r"\degree" and core[-1].value in ("C", "F"):
            core, trailing = core[:-2], MeasureUnit(f"{DEGREE} {core[-1].value.lower()}")
        elif modulus := _modulus(core):
            core, trailing = core[:-len(modulus)], MeasureUnit("mod " + "".join(modulus[1:]).strip("{}"))
        elif [token.value for token in core[-3::2]] == ["(", ")"] and core[-2].kind == "word" and not _meaningful(core[-2:-1]):
            core = [*core[:-3], core[-2]]  # `18 (dollars)`
            continue
        elif end < len(core) and not _meaningful(core[end:]):
            factor, trailing = _unit(core[end:])
            core, multiplier = core[:end], multiplier * factor
        else:
            break
        unit = _combined(trailing, unit)
    if not core or (core[-1].kind == "command" and core[-1].value in ("\\frac", "\\sqrt")):
        return Formula(tuple(tokens), MeasureUnit(), 1)
    return Formula(tuple(core), _combined(money, unit), multiplier)


def _combined(a: MeasureUnit, b: MeasureUnit) -> MeasureUnit:
    """The unit of `a` followed by `b`, e.g. `degree` and `celsius`. One of them may be empty."""
    if a.name == b.name or not b.name:
        return a
    return b if not a.name else MeasureUnit(f"{a.name} {b.name}", b.exponent)


def _without_currency(core: list[Token]) -> tuple[list[Token], MeasureUnit]:
    for index in (0, 1):
        if len(core) > index + 1 and core[index].value in _CURRENCIES and (index == 0 or core[0].value == "-"):
            return core[:index] + core[index + 1:], MeasureUnit(_CURRENCIES[core[index].value])
    if len(core) > 1 and core[-1].value in _CURRENCIES:
        return core[:-1], MeasureUnit(_CURRENCIES[core[-1].value])
    return core, MeasureUnit()


def _phrase_start(core: list[Token]) -> int:
    """Start of the phrase at the end of `core`: words, their exponents, and `/` or `\\cdot` between words."""
    end = len(core)
    while end:
        if core[end - 1].kind == "word":
            if core[end - 1].value.lower() in SEPARATORS:
                break
            end -= 1
        elif end < len(core) and end > 1 and core[end - 1].value in ("/", r"\cdot") and core[end - 2].kind == "word":
            end -= 1
        elif (exponent := _exponent(core[:end])) and end > exponent and core[end - exponent - 1].kind == "word":
            end -= exponent
        else:
            break
    return end


def _meaningful(phrase: list[Token]) -> bool:
    """Whether words are more than a unit: they are in MEANINGFUL, contain a number, or may be variables."""
    phrase_text = " ".join(token.value for token in phrase if token.kind == "word")
    words = re.findall(r"\w+", re.sub(r"\b(non)-(?=negative)", r"\1", phrase_text, flags=re.IGNORECASE))
    while words and singular(words[0].lower()) in MULTIPLIERS:
        words = words[1:]
    if words[1:] and words[0].lower() == "positive":  # `6 positive divisors`; without a noun, `positive` is a sign
        words = words[1:]
    if len(words) == 1 and len(words[0]) < 3 and not is_symbol(words[0]):  # possibly a product of variables
        return True
    return any({word.lower(), singular(word.lower())} & MEANINGFUL or word[0].isdigit() or is_number_word(word)
               for word in words)


def _modulus(core: list[Token]) -> list[str]:
    r"""The values of a trailing `\pmod 7` or `\pmod{7}`, if only an integer precedes it; otherwise an empty list."""
    values = [token.value for token in core]
    start = values.index(r"\pmod") if r"\pmod" in values else 0
    if not re.fullmatch(r"-?\d+", "".join(values[:start])) or not re.fullmatch(r"\d+|\{\d+\}", "".join(values[start + 1:])):
        return []
    return values[start:]


def _exponent(core: list[Token]) -> int:
    """Number of tokens in a trailing exponent, `^2` or `^{2}`; 0 if there is none."""
    values = [token.value for token in core[-4:]]
    if len(values) >= 2 and values[-2] == "^" and values[-1].isdigit():
        return 2
    if len(values) == 4 and values[0] == "^" and values[1] == "{" and values[2].isdigit() and values[3] == "}":
        return 4
    return 0


def _unit(phrase: list[Token]) -> tuple[int, MeasureUnit]:
    """(multiplier, unit) of words and exponents."""
    exponents = [int(token.value) for token in phrase if token.kind == "number"]
    words = " ".join(token.value for token in phrase if token.kind == "word" or token.value == "/").split()
    factor = 1
    while words and singular(words[0].lower()) in MULTIPLIERS:
        factor *= MULTIPLIERS[singular(words.pop(0).lower())]
    name, exponent = unit_of(" ".join(words))
    return factor, MeasureUnit(name, (exponents[-1] if exponents and len(exponents) == 1 else exponent) if name else 1)


ORDERED = ("()", "[]", "(]", "[)", "<>")
"""Brackets whose items are ordered: tuples and intervals."""


class Words(NamedTuple):
    """An answer in words, which is compared as words and never as a product of letters."""

    text: str


class ChoiceAnswer(NamedTuple):
    """The letter of a choice, as in `(C)`, and the text of the choice if the answer contains it."""

    letter: str
    meaning: Answer | None


class Based(NamedTuple):
    """Digits in a base other than ten, e.g. `52_8`."""

    digits: str
    base: int


class Formula(NamedTuple):
    """Mathematics without commas or relations outside brackets, its unit, and its factor (1000 for `5 thousand`)."""

    tokens: tuple[Token, ...]
    unit: MeasureUnit
    multiplier: int = 1


class Several(NamedTuple):
    """Several answers. `kind` is one of:

    - `list`, `set`, `union`: the order of the items does not matter;
    - `intersection`: conditions that must all hold; it never equals a list, a set or a union;
    - `ordered`, or a pair of brackets such as `()`, `[)` or `<>`: the order matters.

    Intervals have no kind of their own, because `(1,2)` may be an interval or a point.
    """

    kind: str
    items: tuple[Answer, ...]
    sure: bool = False
    """Whether the answer cannot be a point: it is a `list` of solutions (`1 or 2`, `x = 1, x = 2`) or an open interval
    (`1 < x < 2`)."""


class Matrix(NamedTuple):
    """A matrix: its rows of entries, and the tokens of the factor before it."""

    rows: tuple[tuple[Answer, ...], ...]
    factor: tuple[Token, ...]


class Named(NamedTuple):
    r"""`name = value`, or `name \in value`, or an interval written as inequalities for the name."""

    name: tuple[Token, ...]
    value: Answer


class Related(NamedTuple):
    r"""Two formulas and the relation between them: `=`, `<`, `\leq` or `\neq`. `a > b` is stored as `b < a`."""

    sign: str
    left: Formula
    right: Formula


class Either(NamedTuple):
    r"""Two forms of one answer, e.g. `\sqrt{2} \approx 1.41`. Another answer needs to equal only one of the forms."""

    answers: tuple[Answer, ...]


Answer = Union[Words, ChoiceAnswer, Based, Formula, Several, Matrix, Named, Related, Either]  # noqa: UP007


_WORDS_AND_SIGNS = re.compile(r"[-+]?\s?\d+(?:[.,:/-]\d+)*|[^\W\d]+|(?<=\w)[-+](?!\w)|[<>=*/^%$]")
"""Words, numbers and signs. A hyphen between words is ignored; a sign before a number or after a grade (`A+`) counts."""


def token_values(tokens: Sequence[Token]) -> tuple[str, ...]:
    r"""The values of tokens, without redundant braces. Braces around one token are redundant, except around several digits.

    Therefore `\frac{1}{2}` equals `\frac12`, but `\frac{1}{23}` does not equal `\frac{1}23`.
    """
    values: list[str] = []
    for token in tokens:
        values.append(token.value)
        if len(values) > 2 and values[-1] == "}" and values[-3] == "{" and not values[-2][1:].isdigit():
            values[-3:] = [values[-2]]
    return tuple(values)


def as_words(answer: Answer) -> str:
    """The text of an answer that is words, letters or a list of single capital letters; otherwise empty."""
    if isinstance(answer, Words):
        return answer.text
    if isinstance(answer, Formula) and all(token.kind in ("letter", "word") for token in answer.tokens):
        return "".join(f" {token.value}" if token.kind == "word" or token.spaced else token.value for token in answer.tokens)
    if isinstance(answer, Several) and answer.kind == "list":
        items = [as_words(item) for item in answer.items]
        return ", ".join(items) if all(re.fullmatch(" ?[A-Z]", item) for item in items) else ""
    return ""


def plain(text: str) -> str:
    """The text reduced to its words, numbers and arithmetic signs, in lower case, without a leading article."""
    return re.sub(r"^(?:the|an|a) (?=\w\w)", "", " ".join(_WORDS_AND_SIGNS.findall(text.lower())))


def is_reals(answer: Answer) -> bool:
    r"""Whether an answer is `(-\infty,\infty)` or `\mathbb{R}`."""
    if isinstance(answer, Several):
        ends = [token_values(item.tokens) for item in answer.items if isinstance(item, Formula)]
        return answer.kind == "()" and len(ends) == 2 and ends[0] == ("-", r"\infty") and ends[1][-1:] == (r"\infty",)
    return isinstance(answer, Formula) and token_values(answer.tokens) == (r"\mathbb", "R")


def as_relation(named: Named) -> Related | None:
    """A named value as a relation of two formulas, e.g. `x = 5` or `x < 5`; None if it cannot be written as one relation."""
    name, value = Formula(named.name, MeasureUnit()), named.value
    if isinstance(value, Formula):
        return Related("=", name, value)
    if not isinstance(value, Several) or value.kind not in ORDERED or len(value.items) != 2:
        return None
    low, high = value.items
    if not isinstance(low, Formula) or not isinstance(high, Formula):
        return None
    if token_values(low.tokens) == ("-", r"\infty"):
        return Related(r"\leq" if value.kind[1] == "]" else "<", name, high)
    if token_values(high.tokens) == (r"\infty",):
        return Related(r"\leq" if value.kind[0] == "[" else "<", low, name)
    return None


def left_minus_right(related: Related) -> Node:
    """The formula left side minus right side. Raises NotParsed."""
    return Node("add", (parse(related.left.tokens), Node("negate", (parse(related.right.tokens),))))


def names(items: Sequence[Answer]) -> set[tuple[str, ...]] | None:
    """The names of the items, if each item has one and there are at least two different names; otherwise None."""
    distinct = {token_values(item.name) for item in items if isinstance(item, Named)}
    return distinct if len(distinct) > 1 and all(isinstance(item, Named) for item in items) else None


def by_name(items: Sequence[Answer]) -> Sequence[Answer]:
    """The items sorted by name, as in a tuple: `y = 1, x = 2` is `(2,1)`.

    The order is kept unless each item has a different name of one lower-case letter.
    """
    named = names(items) or set()
    letters = all(len(name) == len(name[0]) == 1 and name[0].islower() for name in named)
    if len(named) < len(items) or not letters:
        return items
    return sorted((item for item in items if isinstance(item, Named)), key=lambda item: token_values(item.name))


def is_set(answer: Answer) -> bool:
    """Whether an answer is a set. This matters only for the items of a set, because there `{1}` does not equal 1."""
    return isinstance(answer, Several) and answer.kind == "set"


def infinite(several: Several) -> bool:
    """Whether one of the items ends in an infinity sign."""
    return any(isinstance(item, Formula) and item.tokens[-1:] and item.tokens[-1].value == r"\infty" for item in several.items)


def one_by_one(named: Named) -> Answer:
    """`(x,y) = (1,2)` as `x = 1, y = 2`. Any other value is returned unchanged."""
    name, value = enclosed(named.name), named.value
    variables = split(name[1], lambda token: token.value == ",")[0] if name else []
    if not isinstance(value, Several) or value.kind != "()" or len(variables) != len(value.items):
        return value
    return Several("list", tuple(Named(tuple(variable), item) for variable, item in zip(variables, value.items, strict=True)))


def multiplied(node: Node, multiplier: int) -> Node:
    """A formula times the factor of a word such as `thousand`."""
    return node if multiplier == 1 else Node("multiply", (node, Node("number", value=Fraction(multiplier))))


def entries(matrix: Matrix) -> list[Answer]:
    """The entries row by row, each multiplied by the factor before the matrix."""
    cells = [entry for row in matrix.rows for entry in row]
    if not matrix.factor:
        return cells
    factor = _bracketed(matrix.factor) if matrix.factor[0].value not in ("+", "-") else matrix.factor
    return [entry._replace(tokens=(*factor, *_bracketed(entry.tokens))) if isinstance(entry, Formula) else entry
            for entry in cells]


def _bracketed(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    return (Token("sign", "("), *tokens, Token("sign", ")"))
