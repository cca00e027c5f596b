"""Code problems: the tests in a gold answer, and the program in a model's text.

For `grader=code`, `Problem.answer` is a JSON object of one of these kinds. The keys decide the kind. Other keys are ignored.
A dataset can therefore pass on the raw columns of an official row (`json.dumps({column: row[column], ...})`).

**HumanEval** (Chen et al. 2021, arXiv 2107.03374): `{"prompt": "...", "test": "...", "entry_point": "..."}`. `prompt` is the
code that a completion continues (imports, signature, docstring), `test` defines `check(candidate)`, and `entry_point` is the
name of the function that is passed to `check`.

**MBPP** (Austin et al. 2021, arXiv 2108.07732): `{"test_list": ["assert f(1) == 2", ...]}`, with the optional keys
`test_setup_code` (a text, as in the full file) and `test_imports` (a list of texts, as in the sanitized file), which are
executed before the tests. The name of the function is read from the first assertion.
"""

import ast
import json
import re
import textwrap
from typing import Any, NamedTuple

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.extraction import after_thinking, function_of

_FIELDS = ("prompt", "test", "entry_point")
_ALLOWED = "JSON with the texts prompt, test, entry_point as dataset=humaneval has, or with test_list as MBPP has"


class CodeTask(NamedTuple):
    """A code problem with its tests. An empty prompt means that the text has the whole program.

    `test` is the script of the tests, and `entry_point` the function that is tested.
    """

    prompt: str
    test: str
    entry_point: str


def task_of(gold: str) -> CodeTask:
    """Parses a gold answer. Raises UserError if it has no tests of a known kind."""
    try:
        fields = json.loads(gold)
        if "test_list" in fields:
            tests = [_text(test) for test in fields["test_list"]]
            setup = "\n".join([*map(_text, fields.get("test_imports") or ()),
                               _text(fields.get("test_setup_code") or "")]).strip()
            entry_point = _identifier(function_of(tests[0]))
            script = "\n".join([setup, *tests])
            compile(script, "tests", "exec", flags=ast.PyCF_ONLY_AST)
            return CodeTask("", script, entry_point)
        prompt, test, entry_point = (_text(fields[name]) for name in _FIELDS)
        return CodeTask(prompt, f"{test}\ncheck({_identifier(entry_point)})", entry_point)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, SyntaxError) as error:
        raise UserError(f"grader=code: given the gold answer {gold[:60]!r}; allowed: {_ALLOWED}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise ValueError("not a name")
    return name


_OPENED = re.compile(r"\s*(?:`{3,}[^`\n]*|~{3,}[^\n]*)\n")
_CLOSED = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[ \t]*$", re.MULTILINE)
_CLOSED_BEFORE_TEXT = re.compile(r"^[ \t]*```[ \t]+\w", re.MULTILINE)
_INDENTED_FENCE = re.compile(r"^[ \t]{4,}(?=`{3}|~{3})", re.MULTILINE)
_LISTED_FENCE = re.compile(r"^([ \t]*)(?:[-*+]|\d{1,9}[.)])(?=[ \t]+(?:`{3}|~{3}))", re.MULTILINE)
"""The mark of a list before a fence on the same line."""
_MARKDOWN = ("", "markdown", "md", "text", "plaintext")
_DOCSTRING = re.compile(r'"""|\'{3}')
_MAX_FENCES = 6
"""Fences in docstrings and in other fences that are followed. The time for a hostile text therefore stays linear."""
_PROSE = re.compile(r"^[A-Z][\w',’]*(?: [\w'’,()`-]+){2,}[.:!]?[ \t]*$", re.MULTILINE)
"""A line that is a sentence, not code."""
_CODE = re.compile(r"^(?:import |from \w+ import |(?:async )?def \w|class \w|@\w|\w+ = )", re.MULTILINE)
_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\n```", "\n~~~")
"""Ends of a completion: the stop sequences of HumanEval (Chen et al. 2021, section 2.1), and the end of a fenced block."""
_INDENT = "    "
_INDENTED = re.compile(r"\s*^[ \t]+\S", re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
"""An import that must precede all other code."""
_IMPORT = re.compile(r"^(?:import|from)[ \t].*$", re.MULTILINE)
_BEGIN, _DONE = "[BEGIN]", "[DONE]"
"""The marks around a program in MBPP's few-shot prompt (Austin et al. 2021, appendix)."""


def program_of(text: str, task: CodeTask) -> str | None:
    """The program in a text; None if the text is empty or its thinking does not end.

    If a fenced block defines the entry point, the program is the prompt's imports and helpers, followed by the last such
    block. A text without fences counts as one block, unless it begins with the indented body of a function, and so does the
    text before a closing fence whose opening fence is in the prompt. Any other text is a completion of the prompt, which is
    cut at the first stop sequence.

    Without a prompt (MBPP) there is nothing to complete. The program is the last fenced block that defines the entry point, or
    else the last fenced block. Without fences, it is the text between the marks of MBPP's few-shot prompt, or else the code
    between sentences.
    """
    answer = after_thinking(text)
    if answer is None or not answer.strip():
        return None
    answer = answer.removeprefix("\ufeff").replace("\r\n", "\n")
    if not task.prompt:
        blocks = _blocks(answer)
        if not blocks:
            return _code(answer.strip().removeprefix(_BEGIN).partition(_DONE)[0])
        defines = re.compile(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(task.entry_point)}\b", re.MULTILINE)
        return ([block for block in blocks if defines.search(block)] or blocks)[-1]
    defines = _definition(task.entry_point)
    whole = [block for block in _blocks(answer) if defines.search(block)]
    if not whole and not _fenced(answer) and defines.search(answer) and not _INDENTED.match(answer):
        whole = [_code(answer)]
    if whole:
        return "".join(_FUTURE.findall(whole[-1])) + _preamble(task, defines) + _FUTURE.sub("", whole[-1])
    rest = _OPENED.sub("", answer, count=1) if _OPENED.match(answer) else answer
    ends = [end for stop in _STOPS if (end := rest.find(stop)) > 0]
    body = rest[:min(ends)] if ends else rest
    missing = len(_INDENT) - (len(body) - len(body.lstrip(" ")))
    return task.prompt + (body if body[:1] in ("\n", "\r", "\t", "#") or missing <= 0 else " " * missing + body)


def with_tests(program: str, task: CodeTask) -> tuple[str, str]:
    """The script of a program, and the script of its tests, which `inside.runner` executes in another process.

    The program also gets what the tests import, as in HumanEval's harness. The tests have the prompt's own helpers.
    """
    helpers = _preamble(task, _definition(task.entry_point))
    return "\n".join([program, *_IMPORT.findall(task.test)]), f"{helpers}\n{task.test}"


def _definition(name: str) -> re.Pattern:
    return re.compile(rf"^(?:async\s+)?def\s+{re.escape(name)}\b", re.MULTILINE)


def _fenced(text: str) -> bool:
    return "```" in text or "~~~" in text


def _blocks(answer: str) -> list[str]:
    """The fenced blocks, without common indentation. The text before a first fence without a language may be a block too."""
    answer = _LISTED_FENCE.sub(r"\1 ", answer)
    found = _fences(answer) or _fences(_INDENTED_FENCE.sub("", answer))
    blocks = [textwrap.dedent(block) for block in found]
    closed = _CLOSED.search(answer)
    if closed and not _fenced(answer[:closed.start()]) and _CODE.search(answer[:closed.start()]):
        return [*blocks, _code(answer[:closed.start()])] if not _CODE.search(answer[closed.end():]) else blocks
    return blocks


def _fences(text: str, depth: int = 0) -> list[str]:
    """The contents of fenced blocks, as CommonMark reads them, at any indentation. A fence in a docstring ends no block.

    A block of Markdown, or one that begins with a fence, is read as a text with fences of its own.
    """
    from markdown_it import MarkdownIt

    others = ["code", "list", "html_block", "heading", "lheading", "hr", "reference", "inline"]
    parser = MarkdownIt("commonmark").disable(others)
    begin: int | None = 0
    lines, blocks, tries = text.split("\n"), list[str](), 0
    while begin is not None:
        start, begin = begin, None
        tokens = parser.parse("\n".join(lines[start:]))
        for token in tokens:
            if token.type != "fence" or token.map is None:
                continue
            content, info = token.content, token.info.strip().lower()
            if _open(content) and tries < _MAX_FENCES:
                tries += 1
                content, begin = _beyond(lines, start + token.map[0], start + token.map[1], content)
            early = None if _open(content) else _CLOSED_BEFORE_TEXT.search(content)
            content = content[:early.start()] if early else content
            nested = depth < 3 and (info in _MARKDOWN or content.lstrip().startswith(("```", "~~~"))) and _fenced(content)
            inner = _fences(content, depth + 1) if nested else []
            blocks += inner or ([content] if content.strip() else [])
            if begin is not None:
                break
    return blocks


def _open(content: str) -> bool:
    """Whether a docstring begins in a block and does not end in it."""
    quotes = None
    for mark in _DOCSTRING.findall(content):
        quotes = mark if quotes is None else None if quotes == mark else quotes
    return quotes is not None


def _beyond(lines: list[str], first: int, end: int, content: str) -> tuple[str, int | None]:
    """The block up to the fence after which no docstring is open, and the line where the text goes on; else unchanged."""
    for _ in range(4):
        closing = next((at for at in range(end, len(lines)) if _CLOSED.match(lines[at])), None)
        if closing is None:
            break
        end, longer = closing + 1, "\n".join(lines[first + 1:closing]) + "\n"
        if not _open(longer):
            return longer, end
    return content, None


def _code(text: str) -> str:
    """The code of a text without fences: from its first line of code, if sentences stand before it, to the next sentence."""
    begins = _CODE.search(text)
    if begins and _PROSE.search(text[:begins.start()]):
        text = text[begins.start():]
        ends = _PROSE.search(text)
        return text[:ends.start()] if ends else text
    lines = text.rstrip().rsplit("\n", 1)
    return lines[0] + "\n" if len(lines) > 1 and _PROSE.match(lines[1]) and '"""' not in lines[1] else text


def _preamble(task: CodeTask, defines: re.Pattern) -> str:
    """The part of the prompt before the entry point: imports and helper functions."""
    definition = defines.search(task.prompt)
    return task.prompt[:definition.start()] if definition else ""
