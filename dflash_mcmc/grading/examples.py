"""The examples of a function in a text: its calls with literal arguments, and what the text says that they return.

A docstring writes them as a session of the interpreter (`>>> f(1)` and a line with the result), or on a line: `f(1) == 2`,
`f(1) => 2`, `f(1) ➞ 2`, `f(1) returns 2`. An assertion is an example as it is.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator

from dflash_mcmc.types import Example

_MOST = 32
"""The largest number of examples that are read in a text."""
_LONGEST = 2000
"""The largest number of characters in a call."""
_SIGN = re.compile(r"\s*(?:#\s*)?(?:={1,3}>|➞|->|={1,2}|returns?\b|should (?:return|be)\b)?\s*", re.IGNORECASE)
_SESSION = ">>>"
_NAMES = {"true": "True", "false": "False", "null": "None", "none": "None"}
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
        call = _call(text[found.start():found.start() + _LONGEST])
        if call is None or _calls(call, function) != [call]:
            continue
        begin, end = text.rfind("\n", 0, found.start()) + 1, found.start() + len(call)
        before, (rest, _, below) = text[begin:found.start()].strip(), text[end:].partition("\n")
        if before.startswith(_SESSION) and before != _SESSION:  # the call is a part of an expression
            expression = _expression(text[begin:].lstrip().removeprefix(_SESSION).partition("\n")[0])
            value = _below(below) if expression else None
        else:
            expression, value = call, _value(rest[_SIGN.match(rest).end():])  # type: ignore[union-attr]  # it matches ""
            if value is None and before == _SESSION and not rest.partition("#")[0].strip():
                value = _below(below)
        checked = _check(expression, value) if expression and value else ""
        if call not in examples or (checked and not examples[call].check):
            examples[call] = Example(call, checked)
    return tuple(examples.values())[:_MOST]


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


def _check(expression: str, value: str) -> str:
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


def _expression(line: str) -> str:
    """The expression of a line of a session, without its comment; empty if it is none."""
    try:
        return ast.unparse(ast.parse(line.strip(), mode="eval"))
    except (SyntaxError, ValueError):
        return ""


def _below(text: str) -> str | None:
    """The literal on the lines that follow a line of a session."""
    lines = text.split("\n")[:4]
    return next(filter(None, (_value(" ".join(map(str.strip, lines[:count]))) for count in range(1, len(lines) + 1))), None)


def _value(text: str) -> str | None:
    """The literal that a text begins with: the whole text, what follows its last `=`, or what precedes a word or a sign."""
    return next(filter(_is_literal, _candidates(text.strip())), None)


def _candidates(text: str) -> Iterator[str]:
    for part in (text, text.rpartition("= ")[2] if "= " in text else ""):
        ended = part.rstrip(" .,")
        yield from (_NAMES.get(ended.lower(), ended), part)
    for end in reversed([space.start() for space in re.finditer(r"\s+(?![-+*/%]|==?\s|and\b|or\b)", text)]):
        part = text[:end].rstrip(" .,")
        yield _NAMES.get(part.lower(), part)


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True
