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

from dflash_mcmc.grading.math import answers as forms
from dflash_mcmc.grading.math import values
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

    def equal(self, gold: forms.Answer, answer: forms.Answer) -> bool:
        """Whether two answers are equal. Raises Unsupported if the comparison needs values or algebra beyond a limit."""
        for kind, compare in _RULES:
            if isinstance(gold, kind):
                return compare(self, gold, answer)
            if isinstance(answer, kind):
                return compare(self, answer, gold)
        if not isinstance(gold, forms.Formula) or not isinstance(answer, forms.Formula):
            raise TypeError(f"no rule for {type(gold).__name__} and {type(answer).__name__}")
        return self._formulas(gold, answer)

    def _set_rule(self, rule: str) -> None:
        self.rule = self.rule or rule

    def _either(self, either: forms.Either, other: forms.Answer) -> bool:
        self._set_rule("approximation")
        return any(self.equal(answer, other) for answer in either.answers)

    def _choice(self, choice: forms.ChoiceAnswer, other: forms.Answer) -> bool:
        self._set_rule("choice")
        if isinstance(other, forms.ChoiceAnswer):
            if choice.letter != other.letter or choice.meaning is None or other.meaning is None:
                return choice.letter == other.letter
            return self.equal(choice.meaning, other.meaning)
        letter = re.fullmatch(r"\(?([A-Za-z])\)?[.:]?", forms.as_words(other))
        if letter:
            return choice.letter == letter.group(1).upper()
        return choice.meaning is not None and self.equal(choice.meaning, other)

    def _words(self, words: forms.Words, other: forms.Answer) -> bool:
        self._set_rule("text")
        text, other_text = forms.plain(words.text), forms.plain(forms.as_words(other))
        if text in _REALS:
            return other_text in _REALS or forms.is_reals(other)
        return text != "" and text == other_text

    def _based(self, based: forms.Based, other: forms.Answer) -> bool:
        self._set_rule("base")
        return based == other

    def _named(self, named: forms.Named, other: forms.Answer) -> bool:
        if isinstance(other, forms.Named):
            if forms.token_values(named.name) == forms.token_values(other.name):
                self._set_rule("named")
                return self.equal(named.value, other.value)
            return self._related(forms.as_relation(named), forms.as_relation(other))
        if isinstance(other, forms.Related):
            return self._related(forms.as_relation(named), other)
        self._set_rule("named")
        in_parts = isinstance(other, forms.Several) and (other.kind == "()" or forms.names(other.items))
        return self.equal(forms.one_by_one(named) if in_parts else named.value, other)

    def _related(self, related: forms.Related | None, other: forms.Answer | None) -> bool:
        """Compares two equations or inequalities: they are equal if their differences `left - right` are proportional.

        For inequalities, the factor between the differences must be positive.
        """
        self._set_rule("relation")
        if not isinstance(related, forms.Related) or not isinstance(other, forms.Related) or related.sign != other.sign:
            return False
        sides, other_sides = ([forms.token_values(side.tokens) for side in relation[1:]] for relation in (related, other))
        if sides == other_sides:
            return True
        try:
            difference, other_difference = forms.left_minus_right(related), forms.left_minus_right(other)
        except NotParsed:
            return False
        factor = values.ratio(difference, other_difference)
        if factor is None or (related.sign not in ("=", r"\neq") and factor < 0):
            return False
        return values.equal(difference, Node("multiply", (Node("number", value=factor), other_difference)))

    def _matrix(self, matrix: forms.Matrix, other: forms.Answer) -> bool:
        self._set_rule("matrix")
        if not isinstance(other, forms.Matrix) or list(map(len, matrix.rows)) != list(map(len, other.rows)):
            return False
        pairs = zip(forms.entries(matrix), forms.entries(other), strict=True)
        return all(self.equal(entry, other_entry) for entry, other_entry in pairs)

    def _several(self, several: forms.Several, other: forms.Answer) -> bool:
        self._set_rule(_RULE_OF.get(several.kind, several.kind))
        if not isinstance(other, forms.Several):
            alone = several.kind == "set" and len(several.items) == 1 and not isinstance(other, forms.Matrix)
            return self.equal(several.items[0], other) if alone else forms.is_reals(several) and forms.is_reals(other)
        kinds = {several.kind, other.kind}
        if kinds == {"list", "()"} and forms.infinite(several if several.kind == "list" else other):
            return False  # `1, \infty` is not an interval
        if kinds in ({"list", "()"}, {"ordered", "()"}) and (several.sure or other.sure):
            return False  # two solutions are not an open interval
        if kinds in ({"list", "()"}, {"ordered"}, {"ordered", "list"}, {"ordered", "()"}):
            return self._in_order(several.items, other.items)
        if len(kinds) == 1 and kinds <= set(forms.ORDERED):
            return self._in_order(several.items, other.items)
        if kinds == {"list"} and (forms.names(several.items) is None) != (forms.names(other.items) is None):
            return self._in_order(several.items, other.items)  # `x = 1, y = 2` and `1, 2`
        if kinds <= {"list", "set"} or kinds <= {"list", "union"} or kinds == {"intersection"}:
            return self._in_any_order(several.items, other.items, once=kinds != {"list"})
        return False

    def _in_order(self, golds: Sequence[forms.Answer], answers: Sequence[forms.Answer]) -> bool:
        golds, answers = forms.by_name(golds), forms.by_name(answers)
        return len(golds) == len(answers) and all(map(self.equal, golds, answers))

    def _in_any_order(self, golds: Sequence[forms.Answer], answers: Sequence[forms.Answer], once: bool) -> bool:
        """Whether the items match one to one in some order. With `once`, repeated items count once, as in a set."""
        if once:
            golds, answers = self._distinct(golds), self._distinct(answers)
        left = list(answers)
        if len(golds) != len(left):
            return False
        for gold in golds:
            match = next((index for index, answer in enumerate(left)
                          if forms.is_set(gold) == forms.is_set(answer) and self.equal(gold, answer)), None)
            if match is None:
                return False
            del left[match]
        return True

    def _distinct(self, items: Sequence[forms.Answer]) -> list[forms.Answer]:
        distinct: list[forms.Answer] = []
        for item in items:
            if not any(self.equal(item, other) for other in distinct):
                distinct.append(item)
        return distinct

    def _formulas(self, gold: forms.Formula, answer: forms.Formula) -> bool:
        if not gold.unit.fits(answer.unit):
            self._set_rule("unit")
            return False
        if forms.token_values(gold.tokens) == forms.token_values(answer.tokens) and gold.multiplier == answer.multiplier:
            self._set_rule("unit" if gold.unit != answer.unit else "same tokens")
            return True
        if all(token.value.isupper() and token.kind == "letter" for side in (gold, answer) for token in side.tokens):
            self._set_rule("text")  # ABC is an order or a triangle, not the product of A, B and C
            return False
        try:
            nodes = [forms.multiplied(parse(side.tokens), side.multiplier) for side in (gold, answer)]
            rational = None not in [values.exact(node) for node in nodes]
        except (NotParsed, values.NoValue) as error:
            self._set_rule("not parsed" if isinstance(error, NotParsed) else "no value")
            return False
        self._set_rule("number" if rational else "algebra" if any(map(values.symbols, nodes)) else "value")
        return self._with_units(nodes, [side.unit.name for side in (gold, answer)])

    def _with_units(self, nodes: Sequence[Node], units: Sequence[str]) -> bool:
        """Whether two formulas are equal. 50 % equals both 50 and 0.5."""
        for side in (0, 1):
            if units[side] == forms.DEGREE and values.has(nodes[1 - side], "degrees"):  # `270^\circ / 7` and `270/7 degrees`
                nodes = [Node("degrees", (node,)) if index == side else node for index, node in enumerate(nodes)]
        if values.equal(*nodes):
            return True
        if (units[0] == forms.PERCENT) == (units[1] == forms.PERCENT):
            return False
        return values.equal(*(Node("divide", (node, _HUNDRED)) if unit == forms.PERCENT else node
                               for node, unit in zip(nodes, units, strict=True)))


_RULES: tuple[tuple[type[forms.Answer], Callable[[AnswerComparison, Any, forms.Answer], bool]], ...] = (
    (forms.Either, AnswerComparison._either), (forms.Named, AnswerComparison._named),
    (forms.ChoiceAnswer, AnswerComparison._choice),
    (forms.Words, AnswerComparison._words), (forms.Based, AnswerComparison._based), (forms.Related, AnswerComparison._related),
    (forms.Matrix, AnswerComparison._matrix), (forms.Several, AnswerComparison._several),
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


def _of_all(golds: Sequence[forms.Answer], answers: Sequence[forms.Answer]) -> Decision:
    """The best decision over pairs of readings. `correct` is better than `unsupported`, which is better than `wrong`.

    An answer with a comma such as `1,234` has two readings: the comma groups digits in the first reading and separates items
    in the second one. The second readings of the two sides are not compared with each other. If they are equal, the first
    readings are equal too.
    """
    decisions = [_of_two(gold, answer) for i, gold in enumerate(golds) for j, answer in enumerate(answers) if not (i and j)]
    return min(decisions, key=lambda decision: (CORRECT, UNSUPPORTED, WRONG).index(decision.verdict))


def _of_two(gold: forms.Answer, answer: forms.Answer) -> Decision:
    comparison = AnswerComparison()
    try:
        equal = comparison.equal(gold, answer)
    except Unsupported as limit:
        return Decision(UNSUPPORTED, str(limit))
    return Decision(CORRECT if equal else WRONG, comparison.rule)
