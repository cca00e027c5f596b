r"""Extraction of a text's final answer, which is in the part after the thinking. The default rule takes the last box.

The rules have the names that evaluation harnesses use. `hashes` is the format of GSM8K (Cobbe et al. 2021, arXiv 2110.14168);
`last_number` is the `flexible-extract` filter of lm-evaluation-harness. A text can be hostile and is read in the run's own
process. Each rule therefore takes time linear in the length of the text.

The examples of a program are read from its question: calls of the function with literal arguments, and what the question says
that they return. A docstring writes them as a session of the interpreter (`>>> f(1)` and a line with the result), or on a
line: `f(1) == 2`, `f(1) => 2`, `f(1) ➞ 2`, `f(1) returns 2`. An assertion is an example as it is.
"""

import ast
import builtins
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.grading.verdicts import MAX_LENGTH
from dflash_mcmc.types import Example

THINKING = (
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<thought>", "</thought>"), ("<thoughts>", "</thoughts>"),
    ("<reasoning>", "</reasoning>"), ("<reflection>", "</reflection>"), ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"), ("<|think|>", "<|/think|>"), ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|inner_prefix|>", "<|inner_suffix|>"), ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"), ("◁think▷", "◁/think▷"))
"""Marks of thinking, opening and closing, that chat templates use."""
_BOX = re.compile(r"\\(?:f?boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

_THOUSANDS = r"(?:,|\{,\}|,?\\[,!]|['’\u00a0\u2007\u2009\u202f])"
r"""A separator of groups of three digits: a comma, LaTeX's `{,}`, `\,` and `,\!`, an apostrophe, or a narrow space."""
_GROUPED = rf"\d{{1,3}}(?P<separator>{_THOUSANDS})\d{{3}}(?:(?P=separator)\d{{3}})*(?!\d)"
_ARGUMENT = r"\{(?:[^{}\n]|\{[^{}\n]*\}){1,80}\}"
_FRACTION = rf"\\[dt]?frac\s?(?:{_ARGUMENT}\s?{_ARGUMENT}|\d\s?\d)"
_ROOT = rf"(?:\\sqrt\s?(?:\[\d+\])?\s?(?:{_ARGUMENT}|\d)|[√∛]\s?(?:\d+|\(\d+\)))"
_POWER = r"(?:\^(?:\{\s?[-+−]?\d+\s?\}|\(?[-+−]?\d+\)?)|[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)"
_PLAIN = (rf"(?:{_GROUPED.replace('?P<separator>', '?P<NAME>').replace('(?P=separator)', '(?P=NAME)')}|\d+\{{,\}}\d+|\d+)"
          r"(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+")


def _number(name: str) -> str:
    """The pattern of a number in text, whose group of the separator has this name.

    A number is an integer, decimal, fraction, mixed number, root, power, power of ten, multiple of pi, or percentage, with a
    sign and a currency. Digits within a word, an exponent or an index are none.
    """
    plain = _PLAIN.replace("NAME", name)
    return (r"(?:(?<![\w)\]}.])[-+−])?(?<![\w.^_])(?<!\^\{)(?<!_\{)(?<!\^[-+−])(?:\\?[$€£]\s?[-+−]?)?"
            rf"(?:{_FRACTION}|{_ROOT}(?:\s?/\s?\d+)?"
            rf"|(?:{plain})(?:{_POWER}|\s?(?:\\times|\\cdot|[×·*]|x(?=\s?10\^))\s?10{_POWER}"
            rf"|\s?/\s?(?:\d+|{_ROOT})|\s\d+/\d+|\s?{_FRACTION}|\s?[¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]|\s?{_ROOT}(?:\s?/\s?\d+)?"
            r"|_(?:\{\d+\}|\d+))?"
            r"|[¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])(?:\s?(?:\\pi(?![a-zA-Z])|π))?(?:\s?\\?%)?")


NUMBER = _number("one")
_NUMBER = re.compile(NUMBER)
_SEPARATED = re.compile(r"\d(?:\{,\}|,?\\[,!]|['’\u00a0\u2007\u2009\u202f])\d")
"""A separator of thousands that no rule of grading reads. A comma is left to them."""
_HASHES = re.compile(rf"#### ?[*_]*(?:\\\(|\$)?({NUMBER})(?![.)]\s*\w|[.,]?\d|\{{,\}}\d|\\,\d)")
_STATED = re.compile(
    r"^[#*_ \t]{1,9}(?:final\s+)?answer[*_ \t]*\n"
    r"|\banswers?\b[*_]*(?:\s+to\s+[^.\n:=]{1,80}?)?[*_]*(?:\s*[:=]|\s+(?:is|are|was|equals|(?:will|would|must|should)\s+be)\b)[*_:]*"
    r"(?!\s*not\b)(?:\s*(?:therefore|thus|simply|just|exactly|precisely|equal\s+to|approximately|roughly|about)\b)?",
    re.IGNORECASE | re.MULTILINE)
_OF_ANOTHER = re.compile(
    r"(?:\b(?:wrong|incorrect|false|mistaken|erroneous|tempting|naive|naïve|first|earlier|previous|initial|original|hypothetical|"
    r"other|another|alternative|distractor|trap)\s+(?:final\s+)?"
    r"|\b(?:students?|people|many|some|others|one|you|they)\s+(?:\w+\s+){0,2}(?:thinks?|says?|guess|believes?|conclude|assume|answer)"
    r"\s+(?:that\s+)?(?:the\s+)?|\bI\s+(?:\w+\s+)?thought\s+(?:that\s+)?(?:the\s+)?"
    r"|\btempting\s+to\s+\w+\s+(?:that\s+)?(?:the\s+)?|\bin\s+(?:which|that)\s+case,?\s+(?:the\s+)?)$", re.IGNORECASE)
"""What stands right before a statement about a wrong or earlier answer, or somebody else's."""
_CONDITION = re.compile(r"\W*(?:if|had|were|suppose|supposing|assuming|unless|without|with|otherwise)\b", re.IGNORECASE)
_BEFORE_NOW = re.compile(r"\W*(?:previously|earlier|initially|originally|at\s+first)\b", re.IGNORECASE)
_SENTENCE = re.compile(r"\n|[.!?;:](?=\s)")
_REACH = 240
"""Characters of a sentence before and after a statement that are read."""


def about_another(text: str, begin: int, end: int) -> bool:
    """Whether the statement at these places is about a wrong, earlier or hypothetical answer, by the words around it."""
    before, said = text[max(0, begin - _REACH):begin], text[begin:end]
    sentence = _SENTENCE.split(before)[-1]
    if _OF_ANOTHER.search(before) or (_BEFORE_NOW.match(sentence) and re.search(r"\b(?:was|were)\b", said)):
        return True
    after = _SENTENCE.split(text[end:end + _REACH])[0]
    return bool(re.search(r"\bwould\b", said) and (_CONDITION.match(sentence) or re.search(r"\b(?:if|unless)\b", after)))


_END = re.compile(r"\n|(?<![A-Z])(?<!i\.e)[.!?](?=\s|[*_$\"')]*$|[*_$\"')]+\s)|\.?\s*I hope it is correct")
_WRAPPED = re.compile(r"\$\$([^$]+?)\$\$|\$(?=\S)([^$\n]*(?<=\S))\$(?!\d)|\\\((.+?)\\\)|\\\[((?s:.+?))\\\]")
"""Mathematical delimiters. As in Pandoc, no space follows the first dollar sign or precedes the second, and no digit follows
it, so that `$5 and $6` are two amounts."""
_OF_THE_VALUE = (r"(?:pi|sqrt|times|plus|minus|and|or|to|over|hundred|thousand|million|billion|trillion|dozen|percent|"
                 r"degrees?|more|less|fewer|off|divided|multiplied|squared|cubed|factorial|choose|mod|modulo|base|repeating|"
                 r"hal(?:f|ves)|thirds?|quarters?)\b")
_WITH_UNIT = re.compile(rf"({NUMBER})\s+(?!{_OF_THE_VALUE})[a-zA-Z]{{2,}}(?![a-zA-Z(=^_]|,?\s+(?:and\s+)?\d)")
_CLAUSE = (r"(?:\s*[,;]\s+(?!(?:and|or|but|where|if|when|unless|with|except|mod|base|for|plus|minus|times)\b)(?=[a-zA-Z]{2})"
           r"|\s*[—–]\s?(?=[a-zA-Z]{2})|\s+-\s+(?=[a-zA-Z]{2})|\s+\((?!(?:mod|base|in|to|or|and|if|when|not)\b)(?=[a-zA-Z]{2,}[\s)])"
           r"|\s*,?\s+and\s+(?=(?:we|so|she|he|they|thus|hence|therefore)\b)"
           r"|\s+(?=(?:because|since|so|which|as)\b))")
"""What may follow a number that is the whole answer: a clause that does not change its value."""
_WITH_CLAUSE = re.compile(rf"({NUMBER})(?:\s+(?!{_OF_THE_VALUE})[a-zA-Z]{{2,}}(?=[,;]))?{_CLAUSE}")
_ARITHMETIC = re.compile(r"(?=[-−(\\$€£\d.])(?:[\d\s.,\\$€£%()*/+−×÷-]|(?<![\da-zA-Z])[a-zA-Z]{2,}(?![a-zA-Z]))+")
"""The left side of `100 - 99 = 1 pen`: numbers, operators and units, but no unknown."""
_DERIVED = re.compile(rf"(?:,\s*(?:so|thus|hence|therefore|which\s+(?:is|gives|equals|means)|that\s+is)|\bi\.e\.,?|[→⇒]|=>)\s+"
                      rf"(?:that\s+)?(?:[a-zA-Z]\s*=\s*)?({NUMBER})$")
"""The value at the end of a derivation: `2x = 14, so x = 7`."""
_NEGATIVE = re.compile(r"^(?:minus|negative)\s+(?=[\d.$\\])", re.IGNORECASE)
_CENTS = re.compile(r"(\d[\d,]*) dollars? and (\d\d?) cents?(?![a-zA-Z])", re.IGNORECASE)
_BLANK_END = re.compile(r"(?:\s|(?<=\s)\\(?=(?:\\\\)*(?!\\)))*")
r"""Trailing blanks: white space, and the backslash of a `\ ` (not of a `\\`). The pattern is for reversed texts."""
_MARKS = "*_`\"' \t\n"


NO_BOX, UNFINISHED = "no_box", "unfinished_thinking"
"""Reasons that a text has no answer: `boxed` is the only rule and finds none; the thinking does not end."""


class Extraction(NamedTuple):
    """How the answer is found in a text: `rules` in order of preference, and texts that end the answer."""

    rules: tuple[str, ...] = ("boxed",)
    until: tuple[str, ...] = ()

    def find(self, text: str) -> "Extracted":
        """The answer of the first rule that finds one. Without one, `answer` is None and `rule` is the reason."""
        answer = after_thinking(text)
        if answer is None:
            return Extracted(None, UNFINISHED)
        answer = cut(answer, self.until)
        for rule in self.rules:
            extracted = RULES[rule](answer)
            if extracted is not None:
                return Extracted(extracted, rule)
        return Extracted(None, NO_BOX if self.rules == ("boxed",) else "nothing_extracted")

    def named(self, found: "Extracted", rule: str) -> str:
        """The rule of a grade: `rule` if answers are only in boxes, else `extraction/rule`, such as `hashes/integer`."""
        return rule if self.rules == ("boxed",) else f"{found.rule}/{rule}"


class Extracted(NamedTuple):
    """The extracted answer, and the rule that found it or the reason that there is none."""

    answer: str | None
    rule: str


def after_thinking(text: str) -> str | None:
    """The text after the last thinking; the whole text if it has none; None if a thinking is not closed.

    Only its own mark closes a thinking. A closing mark without a beginning counts too: the prompt may have begun the thinking.
    """
    closing = dict(THINKING)
    every = sorted({*closing, *closing.values()}, key=len, reverse=True)
    start, awaited = 0, None
    for found in re.finditer("|".join(map(re.escape, every)), text):
        if found.group() == awaited or (awaited is None and found.group() in closing.values()):
            start, awaited = found.end(), None
        elif awaited is None:
            awaited = closing[found.group()]
    return None if awaited else text[start:]


def continued(prompt: str, text: str, own: Sequence[str] | None = None) -> str:
    """A text for a grader: with the mark of thinking before it if the prompt ends with that, as some chat templates make it.

    The thinking of such a text is unfinished until it is closed. The model's own opening and closing marks become known ones.
    """
    ends = prompt.rstrip()
    for mark, known in zip(own or (), THINKING[0], strict=False):
        ends, text = (known if ends.endswith(mark) else ends), text.replace(mark, known)
    return next((begin + text for begin, _ in THINKING if ends.endswith(begin)), text)


def cut(text: str, until: Sequence[str]) -> str:
    """The text up to the first occurrence of one of the texts `until`."""
    ends = [position for end in until if (position := text.find(end)) >= 0]
    return text[:min(ends)] if ends else text


def last_box(text: str) -> str | None:
    r"""Content of the last balanced `\boxed{...}` or `\fbox{...}` after the thinking; None if there is none.

    The braces are matched in one pass, so that the time is linear in the length even for a text of many unclosed boxes.
    """
    answer = after_thinking(text)
    if answer is None:
        return None
    # Positions of matching braces, opening -> closing
    opened, ends = [], {}
    for match in _BRACE.finditer(answer):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            ends[opened.pop()] = match.start()
    closed = [match for match in _BOX.finditer(answer) if match.end() - 1 in ends]
    if not closed:
        return None
    box = trimmed(answer[closed[-1].end():ends[closed[-1].end() - 1]])
    separated = len(box) <= MAX_LENGTH and _SEPARATED.search(box) and _NUMBER.fullmatch(box)
    return plain_number(box) if separated else box


def after_hashes(text: str) -> str | None:
    """The number after the last `####`, as in `#### 1,234`. A heading such as `#### 1. First step` does not count."""
    last = deque(_HASHES.finditer(text), maxlen=1)
    return plain_number(last[0].group(1)) if last else None


def stated_answer(text: str) -> str | None:
    """The answer after the last `answer is` or `Answer:`: a formula in dollars, a number without its unit, or words."""
    for marker in reversed(list(_STATED.finditer(text))):
        if about_another(text, marker.start(), marker.end()):
            continue
        said = _cleaned(text[marker.end():marker.end() + 2 * MAX_LENGTH].lstrip(_MARKS))
        if said:
            return said
    return None


def last_number(text: str) -> str | None:
    """The last number of the text: an integer, decimal, fraction or percentage."""
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return plain_number(last[0].group()) if last else None


RULES: dict[str, Callable[[str], str | None]] = {
    "boxed": last_box, "hashes": after_hashes, "answer_is": stated_answer, "last_number": last_number}
"""The extraction rules by name. `auto` is all of them in this order."""


def trimmed(text: str) -> str:
    r"""The text without surrounding white space. A trailing `\ `, which is a space in LaTeX, is removed with its backslash."""
    blanks = _BLANK_END.match(text[::-1])
    return text[:len(text) - (blanks.end() if blanks else 0)].lstrip()


def normal(given: object) -> object:
    """A value of `grader.extract` in one form, so that `boxed` and `[boxed]` are the same setting."""
    names = list(given) if isinstance(given, (list, tuple)) else [given]
    return names[0] if len(names) == 1 else names


def rules_of(given: object, known: Sequence[str], auto: tuple[str, ...]) -> tuple[str, ...]:
    """The rules of a value of `grader.extract`: a name, a list of names, or `auto`, for the rules in the argument `auto`.

    Raises ConfigError.
    """
    if given == "auto":
        return auto
    names = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not names or len(set(map(str, names))) < len(names) or any(name not in known for name in names):
        raise ConfigError("grader.extract", given, f"auto, one of {', '.join(known)}, or a list of them, the first preferred")
    return names


def plain_number(text: str) -> str:
    """A matched number without currency, spaces and thousands separators: `-$1,234.50` is `-1234.50`."""
    number = re.sub(r"\\?[$€£]\s?", "", text.replace("−", "-"))
    number = re.sub(_GROUPED, lambda group: re.sub(r"\D", "", group.group()), number)
    number = re.sub(r"(\d)\{,\}(\d)", r"\1.\2", number).strip()
    number = re.sub(r"(\d)\s?x\s?(?=10\^)", r"\1 \\times ", number)
    number = re.sub(r"\s*/\s*", "/", number).replace("\\%", "%").replace(" %", "%")
    return number.replace("%", r"\%").lstrip("+")


def _cleaned(said: str) -> str:
    """The value at the start of a statement, without marks, mathematical delimiters, unit and full stop."""
    box = _BOX.match(said)
    if box or said.startswith((r"$\boxed", r"$$\boxed", r"\(\boxed", r"\[\boxed")):
        return last_box(said.partition("\n")[0]) or ""
    wrapped = _WRAPPED.match(said)
    if wrapped:
        inside = trimmed(next(group for group in wrapped.groups() if group is not None)).rstrip(".,;")
        return plain_number(inside) if _NUMBER.fullmatch(inside) else inside
    ended = _END.search(said)
    line = (said[:ended.start()] if ended else said).strip(_MARKS).rstrip(".,;:!?" + _MARKS)
    line = _CENTS.sub(lambda found: f"{found.group(1)}.{found.group(2):0>2}", _NEGATIVE.sub("-", line))
    clause = _WITH_CLAUSE.match(line)
    if clause:
        return plain_number(clause.group(1))
    derived = _DERIVED.search(line)
    if derived:
        return plain_number(derived.group(1))
    left, equals, right = line.rpartition("=")
    if equals and all(_ARITHMETIC.fullmatch(side.strip()) for side in left.split("=")) and _NUMBER.match(right.strip()):
        line = right.strip()
    number = _NUMBER.fullmatch(line) or _WITH_UNIT.match(line)
    if number:
        return plain_number(number.group(1) if number.re is _WITH_UNIT else line)
    return trimmed(line)


_MOST_EXAMPLES, _LONGEST_CALL = 32, 2000
"""The largest number of examples that are read in a text, and of characters in a call."""
_RETURNS = re.compile(r"\s*(?:#\s*)?(?:={1,3}>|➞|->|={1,2}|returns?\b|should (?:return|be)\b)?\s*", re.IGNORECASE)
_SESSION = ">>>"
_CONSTANTS = {"true": "True", "false": "False", "null": "None", "none": "None"}
_TOLERANCE = 1e-6


def examples_in(question: str, function: str) -> tuple[Example, ...]:
    """The examples of a function in the question of a program: its assertions, or else those of the function's docstring."""
    assertions = [line for line in question.split("\n") if line.startswith("assert ")]
    if assertions:
        return in_assertions(assertions, function)
    return in_docstring(question.rpartition(f"def {function}(")[2], function)


def in_docstring(text: str, function: str) -> tuple[Example, ...]:
    """The examples of a function in a docstring, in their order. One without a literal result has no check."""
    examples = dict[str, Example]()
    for found in re.finditer(rf"\b{re.escape(function)}\(", text):
        call = _call(text[found.start():found.start() + _LONGEST_CALL])
        if call is None or _calls(call, function) != [call]:
            continue
        begin, end = text.rfind("\n", 0, found.start()) + 1, found.start() + len(call)
        before, (rest, _, below) = text[begin:found.start()].strip(), text[end:].partition("\n")
        if before.startswith(_SESSION) and before != _SESSION:  # the call is a part of an expression
            # The expression of a line of a session, without its comment
            try:
                expression = ast.unparse(ast.parse(text[begin:].lstrip().removeprefix(_SESSION).partition("\n")[0].strip(),
                                                   mode="eval"))
            except (SyntaxError, ValueError):
                expression = ""
            value = _below(below) if expression else None
        else:
            expression, value = call, _literal(rest[_RETURNS.match(rest).end():])  # type: ignore[union-attr]  # it matches ""
            if value is None and before == _SESSION and not rest.partition("#")[0].strip():
                value = _below(below)
        checked = _checked(expression, value) if expression and value else ""
        if call not in examples or (checked and not examples[call].check):
            examples[call] = Example(call, checked)
    return tuple(examples.values())[:_MOST_EXAMPLES]


def in_assertions(assertions: list[str], function: str) -> tuple[Example, ...]:
    """The example of each assertion, with its first call of the function; an empty call if its arguments are no literals."""
    return tuple(Example(next(iter(_calls(assertion, function)), ""), assertion) for assertion in assertions)


def function_of(test: str) -> str:
    """The function that an assertion calls: the first call in it that is neither builtin nor of a module. A builtin counts
    where nothing else is called: MBPP has a function `sum`.

    Raises SyntaxError, or IndexError if there is none.
    """
    functions = [node.func for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
    names = [function.id for function in functions if isinstance(function, ast.Name)]
    return next((name for name in names if not hasattr(builtins, name)), names[0])


def _checked(expression: str, value: str) -> str:
    if isinstance(ast.literal_eval(value), float):
        return f"assert abs({expression} - {value}) < {_TOLERANCE}"
    return f"assert ({expression}) == {value}"


def _call(text: str) -> str | None:
    """The call that a text begins with: up to the first parenthesis after which it can be parsed."""
    for closing in re.finditer(r"\)", text):
        try:
            ast.parse(text[:closing.end()], mode="eval")
        except (SyntaxError, ValueError):
            continue
        return text[:closing.end()]
    return None


def _calls(code: str, function: str) -> list[str]:
    """The calls of a function with literal arguments, as the code writes them."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):
        return []
    return [ast.get_source_segment(code, node) or "" for node in nodes if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name) and node.func.id == function and node.args
            and all(_is_literal(ast.unparse(part)) for part in [*node.args, *(named.value for named in node.keywords)])]


def _below(text: str) -> str | None:
    """The literal on the lines that follow a line of a session."""
    lines = text.split("\n")[:4]
    return next(filter(None, (_literal(" ".join(map(str.strip, lines[:count]))) for count in range(1, len(lines) + 1))), None)


def _literal(text: str) -> str | None:
    """The literal that a text begins with: the whole text, what follows its last `=`, or what precedes a word or a sign."""
    return next(filter(_is_literal, _literals(text.strip())), None)


def _literals(text: str) -> Iterator[str]:
    for part in (text, text.rpartition("= ")[2] if "= " in text else ""):
        ended = part.rstrip(" .,")
        yield from (_CONSTANTS.get(ended.lower(), ended), part)
    for end in reversed([space.start() for space in re.finditer(r"\s+(?![-+*/%]|==?\s|and\b|or\b)", text)]):
        part = text[:end].rstrip(" .,")
        yield _CONSTANTS.get(part.lower(), part)


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True
