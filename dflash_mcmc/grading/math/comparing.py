"""The rules of comparison: whether an answer equals the gold answer, and which rule decided.

Each kind of answer has one rule, which is chosen before any algebra. All other answers are compared as formulas; formulas that
cannot be parsed are compared token by token. A pair that its rule rejects is not tried with another rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from dflash_mcmc.grading.math import algebra, values, views
from dflash_mcmc.grading.math.answers import (
    ORDERED,
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
)
from dflash_mcmc.grading.math.formulas import Node, NotParsed
from dflash_mcmc.grading.math.syntax import parse
from dflash_mcmc.grading.math.units import DEGREE, PERCENT

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
        letter = re.fullmatch(r"\(?([A-Za-z])\)?[.:]?", views.as_words(other))
        if letter:
            return choice.letter == letter.group(1).upper()
        return choice.meaning is not None and self.equal(choice.meaning, other)

    def _words(self, words: Words, other: Answer) -> bool:
        self._set_rule("text")
        text, other_text = views.plain(words.text), views.plain(views.as_words(other))
        if text in _REALS:
            return other_text in _REALS or views.is_reals(other)
        return text != "" and text == other_text

    def _based(self, based: Based, other: Answer) -> bool:
        self._set_rule("base")
        return based == other

    def _named(self, named: Named, other: Answer) -> bool:
        if isinstance(other, Named):
            if views.token_values(named.name) == views.token_values(other.name):
                self._set_rule("named")
                return self.equal(named.value, other.value)
            return self._related(views.as_relation(named), views.as_relation(other))
        if isinstance(other, Related):
            return self._related(views.as_relation(named), other)
        self._set_rule("named")
        in_parts = isinstance(other, Several) and (other.kind == "()" or views.names(other.items))
        return self.equal(views.one_by_one(named) if in_parts else named.value, other)

    def _related(self, related: Related | None, other: Answer | None) -> bool:
        """Compares two equations or inequalities: they are equal if their differences `left - right` are proportional.

        For inequalities, the factor between the differences must be positive.
        """
        self._set_rule("relation")
        if not isinstance(related, Related) or not isinstance(other, Related) or related.sign != other.sign:
            return False
        try:
            difference, other_difference = views.difference(related), views.difference(other)
        except NotParsed:
            sides, other_sides = ([views.token_values(side.tokens) for side in relation[1:]] for relation in (related, other))
            return sides == other_sides
        factor = values.ratio(difference, other_difference)
        if factor is None or (related.sign not in ("=", r"\neq") and factor < 0):
            return False
        return algebra.equal(difference, Node("multiply", (Node("number", value=factor), other_difference)))

    def _matrix(self, matrix: Matrix, other: Answer) -> bool:
        self._set_rule("matrix")
        if not isinstance(other, Matrix) or list(map(len, matrix.rows)) != list(map(len, other.rows)):
            return False
        entries, other_entries = views.entries(matrix), views.entries(other)
        return all(self.equal(entry, other_entry) for entry, other_entry in zip(entries, other_entries, strict=True))

    def _several(self, several: Several, other: Answer) -> bool:
        self._set_rule(_RULE_OF.get(several.kind, several.kind))
        if not isinstance(other, Several):
            alone = several.kind == "set" and len(several.items) == 1 and not isinstance(other, Matrix)
            return self.equal(several.items[0], other) if alone else views.is_reals(several) and views.is_reals(other)
        kinds = {several.kind, other.kind}
        if kinds == {"list", "()"} and views.infinite(several if several.kind == "list" else other):
            return False  # `1, \infty` is not an interval
        if kinds in ({"list", "()"}, {"ordered", "()"}) and (several.sure or other.sure):
            return False  # two solutions are not an open interval
        if kinds in ({"list", "()"}, {"ordered"}, {"ordered", "list"}, {"ordered", "()"}):
            return self._in_order(several.items, other.items)
        if len(kinds) == 1 and kinds <= set(ORDERED):
            return self._in_order(several.items, other.items)
        if kinds == {"list"} and (views.names(several.items) is None) != (views.names(other.items) is None):
            return self._in_order(several.items, other.items)  # `x = 1, y = 2` and `1, 2`
        if kinds <= {"list", "set"} or kinds <= {"list", "union"} or kinds == {"intersection"}:
            return self._in_any_order(several.items, other.items, once=kinds != {"list"})
        return False

    def _in_order(self, golds: Sequence[Answer], answers: Sequence[Answer]) -> bool:
        golds, answers = views.by_name(golds), views.by_name(answers)
        return len(golds) == len(answers) and all(map(self.equal, golds, answers))

    def _in_any_order(self, golds: Sequence[Answer], answers: Sequence[Answer], once: bool) -> bool:
        """Whether the items match one to one in some order. With `once`, repeated items count once, as in a set."""
        if once:
            golds, answers = self._distinct(golds), self._distinct(answers)
        left = list(answers)
        if len(golds) != len(left):
            return False
        for gold in golds:
            match = next((place for place, answer in enumerate(left)
                          if views.is_set(gold) == views.is_set(answer) and self.equal(gold, answer)), None)
            if match is None:
                return False
            del left[match]
        return True

    def _distinct(self, items: Sequence[Answer]) -> list[Answer]:
        found: list[Answer] = []
        for item in items:
            if not any(self.equal(item, other) for other in found):
                found.append(item)
        return found

    def _formulas(self, gold: Formula, answer: Formula) -> bool:
        if not gold.unit.fits(answer.unit):
            self._set_rule("unit")
            return False
        if views.token_values(gold.tokens) == views.token_values(answer.tokens) and gold.multiplier == answer.multiplier:
            self._set_rule("unit" if gold.unit != answer.unit else "same tokens")
            return True
        if all(token.value.isupper() and token.kind == "letter" for side in (gold, answer) for token in side.tokens):
            self._set_rule("text")  # ABC is an order or a triangle, not the product of A, B and C
            return False
        try:
            nodes = [views.multiplied(parse(side.tokens), side.multiplier) for side in (gold, answer)]
            rational = None not in [values.exact(node) for node in nodes]
        except (NotParsed, values.NoValue) as error:
            self._set_rule("not parsed" if isinstance(error, NotParsed) else "no value")
            return False
        self._set_rule("number" if rational else "algebra" if any(map(values.symbols, nodes)) else "value")
        return self._with_units(nodes, [side.unit.name for side in (gold, answer)])

    def _with_units(self, nodes: Sequence[Node], units: Sequence[str]) -> bool:
        """Whether two formulas are equal. 50 % equals both 50 and 0.5."""
        for place in (0, 1):
            if units[place] == DEGREE and values.has(nodes[1 - place], "degrees"):  # `270^\circ / 7` and `270/7 degrees`
                nodes = [Node("degrees", (node,)) if number == place else node for number, node in enumerate(nodes)]
        if algebra.equal(*nodes):
            return True
        if (units[0] == PERCENT) == (units[1] == PERCENT):
            return False
        return algebra.equal(*(Node("divide", (node, _HUNDRED)) if unit == PERCENT else node
                               for node, unit in zip(nodes, units, strict=True)))


_RULES: tuple[tuple[type[Answer], Callable[[AnswerComparison, Any, Answer], bool]], ...] = (
    (Either, AnswerComparison._either), (Named, AnswerComparison._named), (ChoiceAnswer, AnswerComparison._choice),
    (Words, AnswerComparison._words), (Based, AnswerComparison._based), (Related, AnswerComparison._related),
    (Matrix, AnswerComparison._matrix), (Several, AnswerComparison._several),
)
"""Pairs (kind, rule). The first pair whose kind is the kind of one of the two answers decides the rule."""
