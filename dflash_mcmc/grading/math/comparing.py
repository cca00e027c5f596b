"""The rules of comparison: whether an answer equals the gold answer, and which rule decided.

Each kind of answer has one rule, which is chosen before any algebra. All other answers are compared as formulas; formulas that
cannot be parsed are compared token by token. A pair that its rule rejects is not tried with another rule. `decide` compares
all readings of two strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from dflash_mcmc.grading.math import values
from dflash_mcmc.grading.math.answers import (
    DEGREE,
    ORDERED,
    PERCENT,
    Answer,
    Based,
    ChoiceAnswer,
    Either,
    Formula,
    Matrix,
    Named,
    Related,
    Several,
    Words,
    as_relation,
    as_words,
    by_name,
    entries,
    infinite,
    is_reals,
    is_set,
    left_minus_right,
    multiplied,
    names,
    one_by_one,
    plain,
    token_values,
)
from dflash_mcmc.grading.math.reading import readings
from dflash_mcmc.grading.math.syntax import Node, NotParsed, parse
from dflash_mcmc.grading.verdicts import CORRECT, UNSUPPORTED, WRONG, Decision, Unsupported, check_size

_REALS = {"all real numbers", "all reals", "real numbers"}
_RULE_OF = {"()": "tuple", "[]": "interval", "<>": "tuple", "(]": "interval", "[)": "interval", "ordered": "list"}
_HUNDRED = Node("number", value=Fraction(100))


class AnswerComparison:
    """One comparison of two answers. Afterwards, `rule` is the outermost rule that was applied."""

    def __init__(self):
        self.rule = ""

    def equal(self, gold: Answer, answer: Answer) -> bool:
        """Whether two answers are equal. Raises Unsupported if the comparison needs values or algebra beyond a limit."""
        for kind, compare in _RULES:
            if isinstance(gold, kind):
                return compare(self, gold, answer)
            if isinstance(answer, kind):
                return compare(self, answer, gold)
        if not isinstance(gold, Formula) or not isinstance(answer, Formula):
            raise TypeError(f"no rule for {type(gold).__name__} and {type(answer).__name__}")
        return self._formulas(gold, answer)

    def _set_rule(self, rule: str) -> None:
        self.rule = self.rule or rule

    def _either(self, either: Either, other: Answer) -> bool:
        self._set_rule("approximation")
        return any(self.equal(answer, other) for answer in either.answers)

    def _choice(self, choice: ChoiceAnswer, other: Answer) -> bool:
        self._set_rule("choice")
        if isinstance(other, ChoiceAnswer):
            if choice.letter != other.letter or choice.meaning is None or other.meaning is None:
                return choice.letter == other.letter
            return self.equal(choice.meaning, other.meaning)
        letter = re.fullmatch(r"\(?([A-Za-z])\)?[.:]?", as_words(other))
        if letter:
            return choice.letter == letter.group(1).upper()
        return choice.meaning is not None and self.equal(choice.meaning, other)

    def _words(self, words: Words, other: Answer) -> bool:
        self._set_rule("text")
        text, other_text = plain(words.text), plain(as_words(other))
        if text in _REALS:
            return other_text in _REALS or is_reals(other)
        return text != "" and text == other_text

    def _based(self, based: Based, other: Answer) -> bool:
        self._set_rule("base")
        return based == other

    def _named(self, named: Named, other: Answer) -> bool:
        if isinstance(other, Named):
            if token_values(named.name) == token_values(other.name):
                self._set_rule("named")
                return self.equal(named.value, other.value)
            return self._related(as_relation(named), as_relation(other))
        if isinstance(other, Related):
            return self._related(as_relation(named), other)
        self._set_rule("named")
        in_parts = isinstance(other, Several) and (other.kind == "()" or names(other.items))
        return self.equal(one_by_one(named) if in_parts else named.value, other)

    def _related(self, related: Related | None, other: Answer | None) -> bool:
        """Compares two equations or inequalities: they are equal if their differences `left - right` are proportional.

        For inequalities, the factor between the differences must be positive.
        """
        self._set_rule("relation")
        if not isinstance(related, Related) or not isinstance(other, Related) or related.sign != other.sign:
            return False
        sides, other_sides = ([token_values(side.tokens) for side in relation[1:]] for relation in (related, other))
        if sides == other_sides:
            return True
        try:
            difference, other_difference = left_minus_right(related), left_minus_right(other)
        except NotParsed:
            return False
        factor = values.ratio(difference, other_difference)
        if factor is None or (related.sign not in ("=", r"\neq") and factor < 0):
            return False
        return values.equal(difference, Node("multiply", (Node("number", value=factor), other_difference)))

    def _matrix(self, matrix: Matrix, other: Answer) -> bool:
        self._set_rule("matrix")
        if not isinstance(other, Matrix) or list(map(len, matrix.rows)) != list(map(len, other.rows)):
            return False
        pairs = zip(entries(matrix), entries(other), strict=True)
        return all(self.equal(entry, other_entry) for entry, other_entry in pairs)

    def _several(self, several: Several, other: Answer) -> bool:
        self._set_rule(_RULE_OF.get(several.kind, several.kind))
        if not isinstance(other, Several):
            alone = several.kind == "set" and len(several.items) == 1 and not isinstance(other, Matrix)
            return self.equal(several.items[0], other) if alone else is_reals(several) and is_reals(other)
        kinds = {several.kind, other.kind}
        if kinds == {"list", "()"} and infinite(several if several.kind == "list" else other):
            return False  # `1, \infty` is not an interval
        if kinds in ({"list", "()"}, {"ordered", "()"}) and (several.sure or other.sure):
            return False  # two solutions are not an open interval
        if kinds in ({"list", "()"}, {"ordered"}, {"ordered", "list"}, {"ordered", "()"}):
            return self._in_order(several.items, other.items)
        if len(kinds) == 1 and kinds <= set(ORDERED):
            return self._in_order(several.items, other.items)
        if kinds == {"list"} and (names(several.items) is None) != (names(other.items) is None):
            return self._in_order(several.items, other.items)  # `x = 1, y = 2` and `1, 2`
        if kinds <= {"list", "set"} or kinds <= {"list", "union"} or kinds == {"intersection"}:
            return self._in_any_order(several.items, other.items, once=kinds != {"list"})
        return False

    def _in_order(self, golds: Sequence[Answer], answers: Sequence[Answer]) -> bool:
        golds, answers = by_name(golds), by_name(answers)
        return len(golds) == len(answers) and all(map(self.equal, golds, answers))

    def _in_any_order(self, golds: Sequence[Answer], answers: Sequence[Answer], once: bool) -> bool:
        """Whether the items match one to one in some order. With `once`, repeated items count once, as in a set."""
        if once:
            golds, answers = self._distinct(golds), self._distinct(answers)
        left = list(answers)
        if len(golds) != len(left):
            return False
        for gold in golds:
            match = next((index for index, answer in enumerate(left)
                          if is_set(gold) == is_set(answer) and self.equal(gold, answer)), None)
            if match is None:
                return False
            del left[match]
        return True

    def _distinct(self, items: Sequence[Answer]) -> list[Answer]:
        distinct: list[Answer] = []
        for item in items:
            if not any(self.equal(item, other) for other in distinct):
                distinct.append(item)
        return distinct

    def _formulas(self, gold: Formula, answer: Formula) -> bool:
        if not gold.unit.fits(answer.unit):
            self._set_rule("unit")
            return False
        if token_values(gold.tokens) == token_values(answer.tokens) and gold.multiplier == answer.multiplier:
            self._set_rule("unit" if gold.unit != answer.unit else "same tokens")
            return True
        if all(token.value.isupper() and token.kind == "letter" for side in (gold, answer) for token in side.tokens):
            self._set_rule("text")  # ABC is an order or a triangle, not the product of A, B and C
            return False
        try:
            nodes = [multiplied(parse(side.tokens), side.multiplier) for side in (gold, answer)]
            rational = None not in [values.exact(node) for node in nodes]
        except (NotParsed, values.NoValue) as error:
            self._set_rule("not parsed" if isinstance(error, NotParsed) else "no value")
            return False
        self._set_rule("number" if rational else "algebra" if any(map(values.symbols, nodes)) else "value")
        return self._with_units(nodes, [side.unit.name for side in (gold, answer)])

    def _with_units(self, nodes: Sequence[Node], units: Sequence[str]) -> bool:
        """Whether two formulas are equal. 50 % equals both 50 and 0.5."""
        for side in (0, 1):
            if units[side] == DEGREE and values.has(nodes[1 - side], "degrees"):  # `270^\circ / 7` and `270/7 degrees`
                nodes = [Node("degrees", (node,)) if index == side else node for index, node in enumerate(nodes)]
        if values.equal(*nodes):
            return True
        if (units[0] == PERCENT) == (units[1] == PERCENT):
            return False
        return values.equal(*(Node("divide", (node, _HUNDRED)) if unit == PERCENT else node
                               for node, unit in zip(nodes, units, strict=True)))


_RULES: tuple[tuple[type[Answer], Callable[[AnswerComparison, Any, Answer], bool]], ...] = (
    (Either, AnswerComparison._either), (Named, AnswerComparison._named), (ChoiceAnswer, AnswerComparison._choice),
    (Words, AnswerComparison._words), (Based, AnswerComparison._based), (Related, AnswerComparison._related),
    (Matrix, AnswerComparison._matrix), (Several, AnswerComparison._several),
)
"""Pairs (kind, rule). The first pair whose kind is the kind of one of the two answers decides the rule."""


def decide(gold: str, answer: str) -> Decision:
    """Decides whether an answer equals the gold answer.

    Call this function in a grading process only: it may take long, and exceptions of the algebra library are not caught.
    """
    if answer.strip() == gold.strip():
        return Decision(CORRECT, "same")
    try:
        check_size(answer)
        check_size(gold)
        return _of_all(readings(gold), readings(answer))
    except Unsupported as limit:
        return Decision(UNSUPPORTED, str(limit))
    except RecursionError:
        return Decision(UNSUPPORTED, "nesting")


def _of_all(golds: Sequence[Answer], answers: Sequence[Answer]) -> Decision:
    """The best decision over pairs of readings. `correct` is better than `unsupported`, which is better than `wrong`.

    An answer with a comma such as `1,234` has two readings: the comma groups digits in the first reading and separates items
    in the second one. The second readings of the two sides are not compared with each other. If they are equal, the first
    readings are equal too.
    """
    decisions = [_of_two(gold, answer) for i, gold in enumerate(golds) for j, answer in enumerate(answers) if not (i and j)]
    return min(decisions, key=lambda decision: (CORRECT, UNSUPPORTED, WRONG).index(decision.verdict))


def _of_two(gold: Answer, answer: Answer) -> Decision:
    comparison = AnswerComparison()
    try:
        equal = comparison.equal(gold, answer)
    except Unsupported as limit:
        return Decision(UNSUPPORTED, str(limit))
    return Decision(CORRECT if equal else WRONG, comparison.rule)
