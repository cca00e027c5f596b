r"""The rules of comparison: whether an answer equals the gold answer, and which rule decided.

Equal strings come first, by PRM800K's rule where it drops nothing. Otherwise both answers are read as one kind each, and the
rule of one kind decides: choices, words, bases, lists, tuples, intervals, equations. math-verify decides formulas. What a rule
refuses, no other accepts. At last, an equal answer must have the form that the question asks for.
"""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from dflash_mcmc.grading.math import algebra, latex, string_rule
from dflash_mcmc.grading.math.latex import SEPARATORS, depths, enclosed, is_number, is_word, measured, split, tokenise
from dflash_mcmc.grading.verdicts import CORRECT, UNSUPPORTED, WRONG, Decision, Unsupported, check_size

_PLAIN = re.compile(r"(?:[-()\[\]/.]|,(?!\s?\d{3})|\\[dt]?frac\{\d+\}\{\d+\}(?!\s*\d)|\d+|(?<!\d) )*")
"""Numbers and brackets. PRM800K's string rule drops units, words, case, braces and the spaces of anything else."""
_ORDER = ("named", "choice", "words", "base", "relation", "several", "formula")
"""The first kind that one of the two answers has decides the rule."""
_RULE_OF = {"()": "tuple", "[]": "interval", "<<": "tuple", "(]": "interval", "[)": "interval", "ordered": "list"}
_REALS = {"all real numbers", "all reals", "real numbers"}
_WORDS = re.compile(r"[-+]?\s?\d+(?:[.,:/-]\d+)*|[^\W\d]+|(?<=\w)[-+](?!\w)|[<>=*/^%$]")
_COMPUTE = re.compile(r"(?i)\b(?:compute|evaluate|simplify|calculate|find|determine|reduce|express|write|convert|what is)\b")
_FRACTION = re.compile(r"(?i)lowest terms|(?:common|simplified|reduced|improper) fraction|as a fraction|simplest form")
_DECIMAL = re.compile(r"(?i)as a (?:\w+ )?decimal|decimal (?:form|answer|number)|nearest (?:tenth|hundredth|thousandth)")
_INTEGERS = re.compile(r"(?:- )?(?:(\d+)|\\frac \{ -? ?(\d+) \} \{ (\d+) \}|(\d+) / (\d+))")


class ReadAnswer(NamedTuple):
    r"""An answer of one kind, with its `form` and its `parts`, which are tokens.

    | kind | form | parts |
    |---|---|---|
    | `named` | the sign | name and value of `x = 5`, `x \in (1,2)` and `x < 2`, and for one inequality also the two sides |
    | `choice` | its letter | the text of the choice, if it is given |
    | `words` | the text | |
    | `base` | digits and base | |
    | `relation` | `=`, `<`, `\leq` or `\neq` | the two sides; `a > b` is `b < a` |
    | `several` | `list`, `set`, `union`, `ordered`, or brackets, as `(]` | the items |
    | `formula` | | one: everything else |
    """

    kind: str
    form: str = ""
    parts: tuple[tuple[str, ...], ...] = ()
    sure: bool = False
    """Whether it cannot be a point: it is a list of solutions (`1 or 2`, `x = 1, x = 2`) or an open interval (`1 < x < 2`)."""


_FALSE = ReadAnswer("formula", "", (('"an equation that does not hold',),))


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
        if not (_PLAIN.fullmatch(gold) and _PLAIN.fullmatch(answer) and string_rule.same_string(gold, answer)):
            golds, answers = _readings(gold), _readings(answer)
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
    parts = [int(part) for part in given.groups() if part] if given else []
    reduced = len(parts) == 1 or (len(parts) == 2 and math.gcd(*parts) == 1)
    if wanted and not wanted[1] and _FRACTION.search(question) and r"\frac" in "".join(golds):
        return reduced
    if not wanted and _DECIMAL.search(question) and len(measured(golds).tokens) == 1:
        return len(parts) < 2
    if golds == answers or not _COMPUTE.search(question) or reduced:
        return True
    functions = {token for token in answers if token in algebra.CALLS and token in asked} - set(golds)
    if functions and not any(token.isalpha() for token in golds):
        return False
    worked_out = all(is_number(token) or token in "-.,;()[]" or is_word(token) for token in answers) or len(answers) < 3
    return worked_out or " ".join(answers) not in " ".join(asked)


# Reading: what kind of answer the tokens are.


def _readings(text: str) -> list[ReadAnswer]:
    r"""The possible meanings of a string: two if a comma may group digits, as in `1,234`, and for `\pi \approx 3.14`."""
    tokens, ungrouped = (tokenise(text, grouping) for grouping in (True, False))
    sides = split(_unwrapped(tokens), lambda token: token == r"\approx")[0]
    if len(sides) > 1 and not _is_name(sides[0]):
        return _approximation(read(sides[0]), sides[-1])
    if tokens == ungrouped:
        return [read(tokens)]
    answer = read(ungrouped)
    return [read(tokens), answer._replace(form="ordered") if answer.form == "list" else answer]


def _approximation(exact: ReadAnswer, last: Sequence[str]) -> list[ReadAnswer]:
    """The meanings of a number with its approximation: both, if they differ by at most 1 %; the number, if it is rounded."""
    if exact.kind in ("formula", "named"):
        side, other = measured(exact.parts[-1]), measured(last)
        try:
            nodes = [algebra.formula(each.tokens) for each in (side, other)]
        except algebra.NotParsed:
            return [_FALSE]
        decimal = re.fullmatch(r"-?\d*\.(\d+)", "".join(other.tokens))
        for value, rounded in algebra.values(*nodes) if not any(node.free_symbols for node in nodes) else ():
            if abs(value - rounded) <= max(abs(value), abs(rounded)) / 100:
                return [exact, read(last)]
            value *= 100 if other.unit == latex.PERCENT != side.unit else 1
            if decimal and other.fits(side) and abs(value - rounded) * 10 ** len(decimal[1]) < 0.500001:
                return [exact]
    return [_FALSE]


def _is_separator(token: str) -> bool:
    return token in (",", ";") or (is_word(token) and token[1:].strip(" ,").lower() in SEPARATORS)


def _unwrapped(tokens: Sequence[str]) -> tuple[str, ...]:
    """Removes braces around all tokens, a leading `=`, `:` or `\\approx`, and trailing punctuation."""
    while True:
        pair = enclosed(tokens)
        if pair and pair[0] == "{{":
            tokens = pair[1]
        elif tokens and tokens[0] in ("=", r"\approx", ":"):
            tokens = tokens[1:]
        elif tokens and tokens[-1] in (".", ",", ";", ":", r"\\"):
            tokens = tokens[:-1]
        else:
            return tuple(tokens)


def _with_signs(tokens: Sequence[str]) -> list[tuple[str, ...]]:
    r"""Both answers of one plus-or-minus; `\mp` takes the opposite sign."""
    signs = {r"\pm": "+-", r"\mp": "-+"}
    if max(map(list(tokens).count, signs)) != 1:
        return [tuple(tokens)]
    return [tuple(signs[token][place] if token in signs else token for token in tokens) for place in (0, 1)]


def read(tokens: Sequence[str]) -> ReadAnswer:
    """Tokens as an answer of one kind."""
    tokens = _unwrapped(tokens)
    if len(tokens) > 1 and all(map(is_word, tokens)):
        return ReadAnswer("words", " ".join(token[1:] for token in tokens))
    parts, separators = split(tokens, _is_separator)
    joining = {token[1:].strip(" ,").lower() for token in separators if is_word(token)}
    if joining == {"and"} and any((order := _relation(_unwrapped(part))) and order.sure for part in parts):
        return ReadAnswer("formula", "", (tokens,))  # `x > 1 and x < 3` is no list
    parts = [part for part in parts if part]
    in_set = len(parts) == 1 and (enclosed(_unwrapped(parts[0])) or [""])[0] == r"\{\{"
    items = [item for part in parts for item in (_with_signs(part) if not in_set else [tuple(part)])]
    if len(items) != 1:
        named = [answer.parts[0] for answer in map(read, items) if answer.kind == "named"]
        point = len(set(named)) == len(items) and "or" not in joining
        return ReadAnswer("several", "list", tuple(items), len(items) > len(parts) or (bool(named or joining) and not point))
    tokens = _unwrapped(items[0])
    if len(tokens) == 1 and (word := tokens[0][1:].lower()) in latex.NUMBERS:
        tokens = (str(latex.NUMBERS[word]),)
    for kind in (_choice_of, _words_of, _relation, _brackets, _based):
        if answer := kind(tokens):
            return answer
    return ReadAnswer("formula", "", (tokens,))


_CHOICE = re.compile(r'"(?i:option|choice) \(? ?([A-J]) ?\)?|"?\( ?([A-Ja-j]) ?\)[.:]?(?: ((?:"|\.?\d|\\frac|\\sqrt).*))?')


def _choice_of(tokens: tuple[str, ...]) -> ReadAnswer | None:
    """A choice such as `(C)`, `(C) 12` or `option C`; None for other tokens."""
    match = _CHOICE.fullmatch(" ".join(tokens))
    content = (tuple(tokenise(match[3])),) if match and match[3] else ()
    return ReadAnswer("choice", (match[1] or match[2]).upper(), content) if match else None


def _words_of(tokens: tuple[str, ...]) -> ReadAnswer | None:
    if tokens and (not is_word(tokens[0]) or tokens[0][1:].lower() in latex.NUMBERS):
        return None
    readable = all(is_word(token) or is_number(token) or token in ".,:;!?'()-&#" for token in tokens)
    return ReadAnswer("words", " ".join(token.lstrip('"') for token in tokens)) if readable else None


_BASED = re.compile(r"(-? ?)(\( ?)?(\d[\dA-F ]*?)(?(2) ?\)) ?(?:_ ?(?:\(?(?:in )?base ?)?|\(?(?:in )?base ?)"
                    rf"(\d{{1,2}}|{'|'.join(latex.NUMBERS)})\)?", re.IGNORECASE)


def _based(tokens: tuple[str, ...]) -> ReadAnswer | None:
    r"""`52_8`, `52_{8}`, `(52)_8`, `52_{\text{eight}}` and `52 \text{ base } 8`; `52_{10}` is 52."""
    match = _BASED.fullmatch(" ".join(token.lstrip('"') for token in tokens if token not in "{}"))
    base = int(latex.NUMBERS.get(match[4].lower(), match[4])) if match else 0
    digits = match[3].replace(" ", "").upper().lstrip("0") or "0" if match else ""
    if match is None or any(int(digit, 16) >= base for digit in digits):
        return None
    sign = match[1].strip()
    return ReadAnswer("base", f"{sign}{digits}_{base}") if base != 10 else ReadAnswer("formula", "", ((*sign, digits),))


def _brackets(tokens: tuple[str, ...]) -> ReadAnswer | None:
    """A union, a set, a tuple or an interval; None for a formula."""
    parts, unions = split(tokens, lambda token: token == r"\cup")
    pair = enclosed(tokens)
    if unions or tokens == (r"\emptyset",):
        return ReadAnswer("several", "union" if unions else "set", tuple(map(tuple, parts)) if unions else ())
    if pair is None or pair[0] in ("floorfloor", "ceilceil"):
        return None
    kind, content = pair
    parts = split(content, _is_separator)[0]
    if kind == r"\{\{":
        (name, *condition), bars = split(content, lambda token: token in ("|", ":"))
        if len(bars) == len(parts) == 1 and _is_name(name[:1]) and "".join(name[1:]) in ("", r"\in\mathbb{R}", r"\in\mathbbR"):
            return read(condition[0])
        return ReadAnswer("several", "set", tuple(item for part in parts if part for item in _with_signs(part)))
    if len(parts) == 1 and kind in ("()", "[]"):
        return read(content) if kind == "()" or read(content).kind != "formula" else None
    return ReadAnswer("several", kind, tuple(map(tuple, parts)), tokens[0] == "⦅")


_REVERSED = {">": "<", r"\geq": r"\leq"}
_RELATIONS = ("=", "<", ">", r"\leq", r"\geq", r"\neq", r"\approx", r"\in")
_OPERATORS = {"+", "-", "/", r"\cdot", "^", r"\frac", r"\sqrt", "!", ",", r"\pm", r"\binom"}
_NOT_NAMES = {"e", "i", r"\pi", r"\infty", r"\degree"}


def _relation(tokens: tuple[str, ...]) -> ReadAnswer | None:
    """An equation or inequality; None without a relation outside brackets. `sure` is set for inequalities."""
    sides, signs = split(tokens, lambda token: token in _RELATIONS)
    if not signs:
        return None
    unread = ReadAnswer("formula", "", (tokens,))
    if not all(sides) or any(side[-1] == "/" for side in sides):  # `x /= 5` and `x =/= 5` mean "not equal"
        return unread
    variable = [*map(_has_variable, sides)]
    if set(signs) == {"="} or signs == [r"\approx"]:
        # a sum that a problem asks for, e.g. `m + n = 25`, is a name; sums with x, y or z are lines
        asked = re.fullmatch(r"[a-df-hj-wA-Z](?:\+[a-df-hj-wA-Z])*", "".join(sides[0])) and not variable[-1]
        if _is_name(sides[0]) or asked:
            return _named("=", sides[0], _result(sides[1:]))
        if len(sides) == 2 and _is_name(sides[1]):
            return _named("=", sides[1], sides[0])
        if not any(variable):
            return read(_result(sides))
    elif signs == [r"\in"] and _is_name(sides[0]):
        pair = enclosed(sides[1])
        return _named(r"\in", sides[0], ["⦅", *pair[1], "⦆"] if pair and pair[0] == "()" else sides[1])
    elif set(signs) <= set(_REVERSED):
        sides, signs, variable = sides[::-1], [_REVERSED[sign] for sign in signs[::-1]], variable[::-1]
    if set(signs) <= {"<", r"\leq"}:
        names = [index for index, side in enumerate(sides) if _is_name(side)]
        bounded = sum(variable) <= 1 and len(names) == 1
        opened, closed = ([pair[sign == r"\leq"] for sign in signs] for pair in ("⦅[", "⦆]"))
        if bounded and len(sides) == 3 and names == [1]:
            return _named(r"\in", sides[1], [opened[0], *sides[0], ",", *sides[2], closed[1]], sure=True)
        if bounded and len(sides) == 2:
            below, above = ["⦅", "-", r"\infty", ",", *sides[1], closed[0]], [opened[0], *sides[0], ",", r"\infty", "⦆"]
            return _named(signs[0], sides[names[0]], below if names == [0] else above, *sides, sure=True)
    if len(sides) != 2 or signs[0] not in ("=", "<", r"\leq", r"\neq"):
        return unread
    return ReadAnswer("relation", signs[0], tuple(map(tuple, sides)), sure=signs[0] in ("<", r"\leq"))


def _named(sign: str, *parts: Sequence[str], sure: bool = False) -> ReadAnswer:
    return ReadAnswer("named", sign, tuple(map(tuple, parts)), sure)


def _is_name(tokens: Sequence[str]) -> bool:
    """Whether tokens name a value: letters with indices, `f(x)`, `AB`, words or `(x,y)`; no numbers or operations."""
    negated = re.search(r'\\(not|neg|lnot) |["\s]not ', "".join(f"{token} " for token in tokens), re.IGNORECASE)
    if not 0 < len(tokens) <= 16 or negated or (len(tokens) == 1 and tokens[0] in _NOT_NAMES):
        return False
    if list(tokens[1:6]) == ["^", "{", "-", "1", "}"] and tokens[6:7] == ["("]:
        tokens = [tokens[0], *tokens[6:]]  # the inverse of a function, `f^{-1}(x)`
    outside = zip(["", *tokens], tokens, depths(tokens), strict=False)
    if any(not depth and (token in _OPERATORS or (is_number(token) and before != "_")) for before, token, depth in outside):
        return False
    return any(token[0].isalpha() or is_word(token) or (token[0] == "\\" and token not in _OPERATORS) for token in tokens)


def _has_variable(tokens: Sequence[str]) -> bool:
    return any(token.isalpha() and token not in _NOT_NAMES for token in tokens)


def _result(sides: Sequence[Sequence[str]]) -> Sequence[str]:
    """The answer in a chain such as `3 + 4 = 7`: its last side, if all sides without variables are equal."""
    pairs = itertools.combinations([side for side in sides if not _has_variable(side)], 2)
    holds = all(equal or rule == "not parsed" for rule, equal in itertools.starmap(_formulas, pairs))
    return sides[-1] if holds else _FALSE.parts[0]


# Comparing: the rule of the kind.


def _equal(gold: Sequence[str], answer: Sequence[str]) -> bool:
    return _compared(read(gold), read(answer))[1]


def _compared(gold: ReadAnswer, answer: ReadAnswer) -> tuple[str, bool]:
    """(the rule that decides, whether two answers are equal). Raises Unsupported beyond the limits."""
    first, second = sorted((gold, answer), key=lambda each: _ORDER.index(each.kind))
    match first.kind:
        case "named":
            name, value = first.parts[:2]
            if second.kind == "named" and second.parts[0] == name:
                return "named", _equal(value, second.parts[1])
            if second.kind in ("named", "relation"):
                return "relation", _proportional(first, second)
            variables, values = ((enclosed(side) or ("", []))[1] for side in (name, value))
            if (second.form == "()" or (second.form == "list" and len(_names(second)) > 1)) and "," in variables:
                pairs = zip(*(split(side, lambda token: token == ",")[0] for side in (variables, values)), strict=False)
                value = tuple(token for variable, item in pairs for token in (*variable, "=", *item, ","))  # `y = 1, x = 2`
            return "named", _compared(read(value), second)[1]
        case "choice":
            content = first.parts[0] if first.parts else ()
            if second.kind == "choice":
                same = not (content and second.parts) or _equal(content, second.parts[0])
                return "choice", first.form == second.form and same
            if letter := re.fullmatch(r"\(?([A-Za-z])\)?[.:]?", _as_words(second).strip()):
                return "choice", first.form == letter[1].upper()
            return "choice", bool(content) and _compared(read(content), second)[1]
        case "words":
            # The words, numbers and signs, in lower case, without a leading article. A sign after a grade counts (`A+`).
            words = [re.sub(r"^(?:the|an|a) (?=\w\w)", "", " ".join(_WORDS.findall(_as_words(each).lower())))
                     for each in (first, second)]
            reals = words[0] in _REALS and (words[1] in _REALS or _is_reals(second))
            return "text", reals or words[0] == words[1] != ""
        case "base":
            return "base", first == second
        case "relation":
            return "relation", _proportional(first, second)
        case "several":
            return _RULE_OF.get(first.form, first.form), _several(first, second)
    return _formulas(first.parts[0], second.parts[0])


def _proportional(first: ReadAnswer, second: ReadAnswer) -> bool:
    """Whether two equations or inequalities are equal: their differences `left - right` are proportional.

    For inequalities, the factor between the differences must be positive.
    """
    if second.kind not in ("named", "relation") or first.form != second.form or first.form == r"\in":
        return False
    if first.parts[-2:] == second.parts[-2:]:
        return True
    try:
        nodes = [[algebra.formula(measured(side).tokens) for side in each.parts[-2:]] for each in (first, second)]
        factor = algebra.ratio(*(left - right for left, right in nodes))
    except algebra.NotParsed:
        return False
    return factor is not None and (first.form in ("=", r"\neq") or factor.real > 0)


def _as_words(answer: ReadAnswer) -> str:
    """The text of an answer that is words, letters or a list of single capital letters; otherwise empty."""
    if answer.kind == "formula" and all(token.isalpha() or is_word(token) for token in answer.parts[0]):
        return "".join(f" {token[1:]}" if is_word(token) else token for token in answer.parts[0])
    items = [_as_words(read(item)) for item in answer.parts] if answer.form == "list" else []
    letters = ", ".join(items) if all(re.fullmatch(" ?[A-Z]", item) for item in items) else ""
    return answer.form if answer.kind == "words" else letters


def _is_reals(answer: ReadAnswer) -> bool:
    reals = answer.form == "()" and answer.parts == (("-", r"\infty"), (r"\infty",))
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
        infinite = any(end[-1:] == (r"\infty",) for end in several.parts)  # `1, \infty` is not an interval
        if several.sure or other.sure or (infinite and "list" in forms):  # two solutions are not an open interval
            return False
    elif forms <= {"list", "set"} or forms <= {"list", "union"}:
        if forms != {"list"} or (len(_names(several)) > 1) == (len(_names(other)) > 1):  # not `x = 1, y = 2` and `1, 2`
            return _in_any_order(several.parts, other.parts, once=forms != {"list"})
    elif len(forms) > 1 and forms != {"ordered", "list"}:
        return False
    if len(several.parts) != len(other.parts):
        return False
    # `y = 1, x = 2` is `(2,1)`: with different names of one small letter, items stand in the order of the names.
    sides = [sorted(each.parts, key=lambda item: read(item).parts[0]) if len(names := _names(each)) == len(each.parts)
             and all(len(name) == 1 and name[0].islower() for name in names) else each.parts for each in (several, other)]
    return all(map(_equal, *sides))


def _in_any_order(golds: Sequence[tuple[str, ...]], answers: Sequence[tuple[str, ...]], once: bool) -> bool:
    """Whether the items match one to one in some order. With `once`, repeated items count once, as in a set."""
    if once:
        golds, answers = ([item for index, item in enumerate(items) if not any(_equal(item, other) for other in items[:index])]
                          for items in (golds, answers))
    left = list(answers)
    for gold in golds:  # a set in a set is no element: `{1}` does not equal 1 there
        is_set = read(gold).form == "set"
        match = next((answer for answer in left if is_set == (read(answer).form == "set") and _equal(gold, answer)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


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
        if side.unit == latex.DEGREE and r"\degree" in sides[1 - index].tokens:  # `270^\circ / 7` and `270/7 degrees`
            nodes[index] = nodes[index] * algebra.formula((r"\frac", "{", r"\pi", "}", "{", "180", "}"))
    rule = "matrix" if any(node.is_Matrix for node in nodes) else "algebra" if any(
        node.free_symbols for node in nodes) else "number"
    percent = [side.unit == latex.PERCENT for side in sides]  # 50 % equals both 50 and 0.5
    shares = [node / 100 if each else node for node, each in zip(nodes, percent, strict=True)]
    return rule, algebra.same(*nodes) or (percent[0] != percent[1] and algebra.same(*shares))
