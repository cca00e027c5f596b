"""The rules of comparison: whether an answer equals the gold answer, and which rule decided.

Equal strings come first, by PRM800K's rule where it drops nothing. Of each kind of answers one rule decides: choices, words,
bases, lists, tuples, intervals, equations. math-verify decides formulas. What a rule refuses, no other accepts. At last, an
equal answer must have the form that the question asks for.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from dflash_mcmc.grading.math import algebra
from dflash_mcmc.grading.math.latex import enclosed, is_number, is_word, split, tokenise
from dflash_mcmc.grading.math.reading import ReadAnswer, read, readings
from dflash_mcmc.grading.math.string_rule import same_string
from dflash_mcmc.grading.math.units import DEGREE, PERCENT, measured
from dflash_mcmc.grading.verdicts import CORRECT, UNSUPPORTED, WRONG, Decision, Unsupported, check_size

_PLAIN = re.compile(r"(?:[-()\[\]/.]|,(?!\s?\d{3})|\\[dt]?frac\{\d+\}\{\d+\}(?!\s*\d)|\d+|(?<!\d) )*")
"""Numbers and brackets. PRM800K's string rule drops units, words, case, braces and the spaces of anything else."""
_ORDER = ("either", "named", "choice", "words", "base", "relation", "several", "formula")
"""The first kind that one of the two answers has decides the rule."""
_BRACKETS = ("()", "[]", "(]", "[)", "<<")
_RULE_OF = {"()": "tuple", "[]": "interval", "<<": "tuple", "(]": "interval", "[)": "interval", "ordered": "list"}
_REALS = {"all real numbers", "all reals", "real numbers"}
_COMPUTE = re.compile(r"(?i)\b(?:compute|evaluate|simplify|calculate|find|determine|reduce|express|write|convert|what is)\b")
_FRACTION = re.compile(r"(?i)lowest terms|(?:common|simplified|reduced|improper) fraction|as a fraction|simplest form")
_DECIMAL = re.compile(r"(?i)as a (?:\w+ )?decimal|decimal (?:form|answer|number)|nearest (?:tenth|hundredth|thousandth)")
_INTEGERS = re.compile(r"(?:- )?(?:(\d+)|\\frac \{ -? ?(\d+) \} \{ (\d+) \}|(\d+) / (\d+))")


def decide(gold: str, answer: str, question: str = "") -> Decision:
    """Decides whether an answer equals the gold answer, in the form that the question asks for, if it is given.

    Call this function in a grading process only: it may take long, and exceptions of the algebra library are not caught.
    """
    if answer.strip() == gold.strip():
        return Decision(CORRECT, "same")
    try:
        check_size(answer)
        check_size(gold)
        best = Decision(CORRECT, "string")
        if not (_PLAIN.fullmatch(gold) and _PLAIN.fullmatch(answer) and same_string(gold, answer)):
            golds, answers = readings(gold), readings(answer)
            pairs = [(golds[0], each) for each in answers] + [(each, answers[0]) for each in golds[1:]]
            ranks = (CORRECT, UNSUPPORTED, WRONG)
            best = min(itertools.starmap(_decided, pairs), key=lambda decision: ranks.index(decision.verdict))
        lacks_form = best.verdict == CORRECT and question and not _has_asked_form(gold, answer, question)
        return Decision(WRONG, "form") if lacks_form else best
    except Unsupported as limit:
        return Decision(UNSUPPORTED, str(limit))


def _decided(gold: ReadAnswer, answer: ReadAnswer) -> Decision:
    try:
        rule, equal = _compared(gold, answer)
        return Decision(CORRECT if equal else WRONG, rule)
    except Unsupported as limit:
        return Decision(UNSUPPORTED, str(limit))
    except RecursionError:
        return Decision(UNSUPPORTED, "nesting")


def _has_asked_form(gold: str, answer: str, question: str) -> bool:
    """Whether an answer that equals the gold answer has the form that the question asks for.

    A question that asks for a fraction in lowest terms gets one, and no decimal; one that asks for a decimal gets no fraction.
    An answer is refused too if it is an expression of the question that is not worked out, or still has a function of it, such
    as `\\sin`, where the gold answer is a number without functions.
    """
    golds, answers, asked = tokenise(gold), tokenise(answer), tokenise(question)
    wanted, given = (_INTEGERS.fullmatch(" ".join(measured(side).tokens)) for side in (golds, answers))
    if wanted and not wanted[1] and _FRACTION.search(question) and r"\frac" in "".join(golds):
        return _is_reduced(given)
    if not wanted and _DECIMAL.search(question) and len(measured(golds).tokens) == 1:
        return given is None or given[1] is not None
    if golds == answers or not _COMPUTE.search(question) or (given and _is_reduced(given)):
        return True
    functions = {token for token in answers if token in algebra.CALLS and token in asked} - set(golds)
    if functions and not any(token.isalpha() for token in golds):
        return False
    worked_out = all(is_number(token) or token in "-.,;()[]" or token[0] == '"' for token in answers) or len(answers) < 3
    return worked_out or " ".join(answers) not in " ".join(asked)


def _is_reduced(fraction: re.Match | None) -> bool:
    parts = [int(part) for part in fraction.groups() if part] if fraction else []
    return len(parts) == 1 or (len(parts) == 2 and math.gcd(*parts) == 1)


def _equal(gold: Sequence[str], answer: Sequence[str]) -> bool:
    return _compared(read(gold), read(answer))[1]


def _compared(gold: ReadAnswer, answer: ReadAnswer) -> tuple[str, bool]:
    """(the rule that decides, whether two answers are equal). Raises Unsupported beyond the limits."""
    first, second = sorted((gold, answer), key=lambda each: _ORDER.index(each.kind))
    match first.kind:
        case "either":
            return "approximation", any(_compared(read(form), second)[1] for form in first.parts)
        case "named":
            return _named(first, second)
        case "choice":
            return "choice", _choice(first, second)
        case "words":
            words = [_plain_words(_as_words(each)) for each in (first, second)]
            reals = words[0] in _REALS and (words[1] in _REALS or _is_reals(second))
            return "text", reals or words[0] == words[1] != ""
        case "base":
            return "base", first == second
        case "relation":
            return "relation", second.kind == "relation" and _proportional(first.form, first.parts, second.form, second.parts)
        case "several":
            return _RULE_OF.get(first.form, first.form), _several(first, second)
    return _formulas(first.parts[0], second.parts[0])


def _named(first: ReadAnswer, second: ReadAnswer) -> tuple[str, bool]:
    name, value = first.parts
    if second.kind == "named" and second.parts[0] == name:
        return "named", _equal(value, second.parts[1])
    if second.kind in ("named", "relation"):
        one, other = (_as_relation(each) if each.kind == "named" else (each.form, each.parts) for each in (first, second))
        return "relation", one is not None and other is not None and _proportional(*one, *other)
    variables, values = ((enclosed(side) or ("", []))[1] for side in (name, value))
    if (second.form == "()" or (second.form == "list" and len(_names(second)) > 1)) and "," in variables:
        pairs = zip(*(split(side, lambda token: token == ",")[0] for side in (variables, values)), strict=False)
        value = tuple(token for variable, item in pairs for token in (*variable, "=", *item, ","))  # `y = 1, x = 2`
    return "named", _compared(read(value), second)[1]


def _as_relation(named: ReadAnswer) -> tuple[str, tuple[tuple[str, ...], ...]] | None:
    """A named value as a relation of two formulas, e.g. `x = 5` or `x < 5`; None if it cannot be written as one relation."""
    name, value = named.parts
    answer = read(value)
    if answer.kind == "formula":
        return "=", (name, value)
    if answer.form not in _BRACKETS or len(answer.parts) != 2:
        return None
    if answer.parts[0] == ("-", r"\infty"):
        return r"\leq" if answer.form[1] == "]" else "<", (name, answer.parts[1])
    return (r"\leq" if answer.form[0] == "[" else "<", (answer.parts[0], name)) if answer.parts[1] == (r"\infty",) else None


def _proportional(sign: str, sides: Sequence[Sequence[str]], other_sign: str, others: Sequence[Sequence[str]]) -> bool:
    """Whether two equations or inequalities are equal: their differences `left - right` are proportional.

    For inequalities, the factor between the differences must be positive.
    """
    if sign != other_sign or sides == others:
        return sign == other_sign
    try:
        nodes = [[algebra.formula(measured(side).tokens) for side in each] for each in (sides, others)]
        factor = algebra.ratio(*(left - right for left, right in nodes))
    except algebra.NotParsed:
        return False
    return factor is not None and (sign in ("=", r"\neq") or factor.real > 0)


def _choice(choice: ReadAnswer, other: ReadAnswer) -> bool:
    if other.kind == "choice":
        return choice.form == other.form and (not (choice.parts and other.parts) or _equal(choice.parts[0], other.parts[0]))
    if letter := re.fullmatch(r"\(?([A-Za-z])\)?[.:]?", _as_words(other).strip()):
        return choice.form == letter[1].upper()
    return bool(choice.parts) and _compared(read(choice.parts[0]), other)[1]


def _as_words(answer: ReadAnswer) -> str:
    """The text of an answer that is words, letters or a list of single capital letters; otherwise empty."""
    if answer.kind == "formula" and all(token.isalpha() or is_word(token) for token in answer.parts[0]):
        return "".join(f" {token[1:]}" if is_word(token) else token for token in answer.parts[0])
    items = [_as_words(read(item)) for item in answer.parts] if answer.form == "list" else []
    letters = ", ".join(items) if all(re.fullmatch(" ?[A-Z]", item) for item in items) else ""
    return answer.form if answer.kind == "words" else letters


def _plain_words(text: str) -> str:
    """The words, numbers and signs of a text, in lower case, without a leading article. A sign after a grade counts (`A+`)."""
    signs = r"[-+]?\s?\d+(?:[.,:/-]\d+)*|[^\W\d]+|(?<=\w)[-+](?!\w)|[<>=*/^%$]"
    return re.sub(r"^(?:the|an|a) (?=\w\w)", "", " ".join(re.findall(signs, text.lower())))


def _ends(several: ReadAnswer) -> list[tuple[str, ...]]:
    return [tuple(token for token in item if token != "+") for item in several.parts]


def _is_reals(answer: ReadAnswer) -> bool:
    reals = answer.form == "()" and _ends(answer) == [("-", r"\infty"), (r"\infty",)]
    return reals or (answer.kind == "formula" and "".join(answer.parts[0]) in (r"\mathbb{R}", r"\mathbbR"))


def _names(several: ReadAnswer) -> set[tuple[str, ...]]:
    """The names of the items, if each has one; otherwise empty."""
    items = [read(item) for item in several.parts]
    return {item.parts[0] for item in items} if all(item.kind == "named" for item in items) else set()


def _several(several: ReadAnswer, other: ReadAnswer) -> bool:
    if other.kind != "several":
        alone = several.form == "set" and len(several.parts) == 1 and r"\begin" not in "".join(other.parts[0])
        return _compared(read(several.parts[0]), other)[1] if alone else _is_reals(several) and _is_reals(other)
    forms = {several.form, other.form}
    if forms in ({"list", "()"}, {"ordered", "()"}):
        infinite = any(end[-1:] == (r"\infty",) for end in _ends(several))  # `1, \infty` is not an interval
        if several.sure or other.sure or (infinite and "list" in forms):  # two solutions are not an open interval
            return False
    elif forms <= {"list", "set"} or forms <= {"list", "union"} or forms == {"intersection"}:
        if forms != {"list"} or (len(_names(several)) > 1) == (len(_names(other)) > 1):  # not `x = 1, y = 2` and `1, 2`
            return _in_any_order(several.parts, other.parts, once=forms != {"list"})
    elif forms not in ({"ordered"}, {"ordered", "list"}) and not (len(forms) == 1 and forms <= set(_BRACKETS)):
        return False
    golds, answers = _by_name(several), _by_name(other)
    return len(golds) == len(answers) and all(map(_equal, golds, answers))


def _by_name(several: ReadAnswer) -> Sequence[tuple[str, ...]]:
    """The items sorted by name, as in a tuple: `y = 1, x = 2` is `(2,1)`, if they have different names of one small letter."""
    names, count = _names(several), len(several.parts)
    if count < 2 or len(names) < count or not all(len(name) == 1 and name[0].islower() for name in names):
        return several.parts
    return sorted(several.parts, key=lambda item: read(item).parts[0])


def _in_any_order(golds: Sequence[tuple[str, ...]], answers: Sequence[tuple[str, ...]], once: bool) -> bool:
    """Whether the items match one to one in some order. With `once`, repeated items count once, as in a set."""
    if once:
        golds, answers = ([item for index, item in enumerate(items) if not any(_equal(item, other) for other in items[:index])]
                          for items in (golds, answers))
    if len(golds) != len(answers):
        return False
    for gold in golds:  # a set in a set is no element: `{1}` does not equal 1 there
        match = next((index for index, answer in enumerate(answers)
                      if (read(gold).form == "set") == (read(answer).form == "set") and _equal(gold, answer)), None)
        if match is None:
            return False
        answers = [*answers[:match], *answers[match + 1:]]
    return True


def _formulas(gold: Sequence[str], answer: Sequence[str]) -> tuple[str, bool]:
    sides = [measured(side) for side in (gold, answer)]
    if not sides[0].fits(sides[1]):
        return "unit", False
    if (sides[0].tokens, sides[0].factor) == (sides[1].tokens, sides[1].factor):
        return "unit" if sides[0].unit != sides[1].unit else "same tokens", True
    if all(token.isalpha() and token.isupper() for side in sides for token in side.tokens):
        return "text", False  # ABC is an order or a triangle, not the product of A, B and C
    try:
        nodes: list[Any] = [algebra.formula(side.tokens) * side.factor for side in sides]
    except algebra.NotParsed:
        return "not parsed", False
    for index, side in enumerate(sides):
        if side.unit == DEGREE and r"\degree" in sides[1 - index].tokens:  # `270^\circ / 7` and `270/7 degrees`
            nodes[index] = nodes[index] * algebra.formula((r"\frac", "{", r"\pi", "}", "{", "180", "}"))
    percent = [side.unit == PERCENT for side in sides]  # 50 % equals both 50 and 0.5
    shares = [node / 100 if each else node for node, each in zip(nodes, percent, strict=True)]
    return algebra.rule_of(*nodes), algebra.same(*nodes) or (percent[0] != percent[1] and algebra.same(*shares))
