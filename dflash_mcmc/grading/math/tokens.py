r"""Tokens of LaTeX. Answers that differ only in appearance have the same tokens.

`\left`, `\,` and the `$` around mathematics are dropped. `\dfrac`, `\mathrm`, Unicode signs, and words instead of commands
(`sqrt`, `pi`) are replaced by one common form. `prefixed` rewrites the infix commands `{1 \over 3}` and `{n \choose 2}` as
`\frac` and `\binom`. Then come brackets: nesting depth, splitting outside brackets, and the content of a pair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dflash_mcmc.grading.characters import matched, to_latex, trimmed
from dflash_mcmc.grading.math.words import BARE, FUNCTIONS, LINKS, NAMED, NUMBERS, SEPARATORS, SHORT_WORDS, singular


class Token(NamedTuple):
    """A token. `kind` is number, repeating, letter, word (text), command, sign, begin or end (of an environment).

    The value of a `number` is digits, possibly with a point and an exponent. The value of a `repeating` decimal has the form
    `whole.fixed(period)`.
    """

    kind: str
    value: str
    spaced: bool = False
    """Whether white space precedes it."""


_THIN = r"(?:\{\s*,\s*\}|,\s*\\!\s*|\\[,;:! ]\s*|~|[ ])"
_SCIENTIFIC = r"(?:(?:\d+\.\d+|\.\d+|(?<![\d.])1)[eE][+-]?\d+|\d+[eE]\d+)(?![\d.]|[a-zA-Z])"
_SCANNER = re.compile(rf"""
    (?P<space>\s+|\\[,;:>\ !]|~|\\(?:quad|qquad|enspace|thinspace|space|hfill|newline)(?![a-zA-Z])
        |\\[hv]?(?:space|phantom)\s*\*?\{{[^{{}}]*\}})
  | (?P<dropped>\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?
        |\\(?:textcolor|color)\s*\{{[a-zA-Z]+\}}
        |\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|boldmath|bf|rm|it|tt|mathbf|boldsymbol|bm|pmb|mathit
            |mathnormal|ensuremath|underline|boxed|fbox|nonumber)(?![a-zA-Z])|\\[()\[\]]
        |\^\s*\{{?\s*\\(?:text|mathrm|mbox|textrm|textsuperscript)\s*\{{\s*(?:st|nd|rd|th)\s*\}}\s*\}}?)
  | (?P<ordinal>(?<=\d)\^\{{\s*th\s*\}})
  | (?P<degree>\^\s*(?:\{{\s*\\(?:circ|degree)\s*\}}|\\(?:circ|degree)(?![a-zA-Z]))|\\(?:degree|textdegree)(?![a-zA-Z]))
  | (?P<prime>\^\s*(?:\{{\s*(?:\\prime\s*)+\}}|\\prime(?![a-zA-Z])))
  | (?P<repeating>\d*\.\d*\\(?:overline|bar|dot)\s*(?:\{{\s*\d+\s*\}}|\d))
  | (?P<joined>(?<![\d.,])\d{{1,3}}(?:{_THIN}\d{{3}})+(?![\d])(?:\.\d+)?)
  | (?P<grouped>(?<![\d.,])\d{{1,3}}(?:,\d{{3}})+(?!,?\d)(?:\.\d+)?)
  | (?P<number>{_SCIENTIFIC}|\d+(?:\.\d*)?|\.\d+)
  | (?P<text>\\(?:text|mbox|hbox|textrm|textbf|textit|textnormal|textsf|texttt|textup|mathrm|mathsf|mathtt|emph
        |operatorname)\*?\s*(?=\{{))
  | (?P<edge>\\(?:begin|end)\s*\{{\s*[a-zA-Z]+\*?\s*\}}(?:\s*\{{[lcr|\s]*\}})?)
  | (?P<command>\\[a-zA-Z]+\*?|\\.)
  | (?P<word>[a-zA-Z]+)
  | (?P<sign>.)
""", re.VERBOSE | re.DOTALL)
_COUNTED = re.compile(r"(\\ ?)?(-?[\d.,/:]*\d)\s+([a-zA-Z][a-zA-Z. ]*)")
_ANSWER_PREFIX = re.compile(r"^\s*(?:the )?(?:final )?answer(?: is)?\s*:\s*", re.IGNORECASE)
_ENVIRONMENT = re.compile(r"\\begin|\\end")
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z])")
_ROW_GAP = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm)\s*\]")
_ABBREVIATED = re.compile(r"\b(sq|cu)\.(?=\s*[a-zA-Z])")
_ORDINAL = re.compile(r"(\d*)(?:(?<!1)1st|(?<!1)2nd|(?<!1)3rd|\dth)")
_DIGITS = re.compile(r"(?P<number>\d+)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\[a-z]+\s*\{?\s*(\d+)\s*\}?")
_EDGE_NAME = re.compile(r"[^{]*\{\s*([a-zA-Z]+)")
_SAME = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\dbinom": r"\binom", r"\tbinom": r"\binom",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]", r"\lvert": "|", r"\rvert": "|",
    r"\vert": "|", r"\mid": "|",
    r"\le": r"\leq", r"\leqslant": r"\leq", r"\leqq": r"\leq", r"\ge": r"\geq", r"\geqslant": r"\geq", r"\geqq": r"\geq",
    r"\ne": r"\neq", r"\lt": "<", r"\gt": ">", r"\times": r"\cdot", r"\ast": r"\cdot", r"\cdotp": r"\cdot", "*": r"\cdot",
    r"\div": "/", r"\dots": r"\ldots", r"\cdots": r"\ldots", r"\dotsc": r"\ldots", r"\dotsb": r"\ldots",
    r"\varnothing": r"\emptyset",
    r"\prime": "'", r"\colon": ":", r"\bar": r"\overline", r"\%": "%", r"\$": "$", r"\textdollar": "$", r"\&": "&", r"\#": "#",
    r"\simeq": r"\approx", r"\thickapprox": r"\approx", r"\tg": r"\tan", r"\ctg": r"\cot", r"\arctg": r"\arctan",
    r"\cosec": r"\csc",
    r"\varphi": r"\phi", r"\varepsilon": r"\epsilon", r"\vartheta": r"\theta", r"\to": r"\rightarrow",
}
_PAIRS = {("<", "="): r"\leq", (">", "="): r"\geq", ("!", "="): r"\neq", ("=", "="): "=", (r"\not", "="): r"\neq",
          (r"\cdot", r"\cdot"): "^"}
_FUNCTION_OF_ONE = re.compile(rf"({'|'.join(FUNCTIONS)}|pi|sqrt)([a-zA-Z])")


def tokenise(text: str, grouping: bool = True) -> list[Token]:
    """Tokens of an answer. With `grouping`, the comma of `1,234` groups digits; otherwise it separates two numbers."""
    text = trimmed(to_latex(text).replace("...", r"\ldots "))
    text = _ANSWER_PREFIX.sub("", text)
    text = _ABBREVIATED.sub(r"\1", _ROW_GAP.sub(r"\\\\", text))
    if len(text) > 4 and text.startswith("**") and text.endswith("**"):
        text = text[2:-2]
    if r"\\" in text and not _ENVIRONMENT.search(text):
        text = _DOUBLED.sub(r"\\", text)  # `\\\\frac`, as models write it in JSON
    text = trimmed(_without_dollars(text))
    return _joined(_scan(text, grouping))


def _without_dollars(text: str) -> str:
    """Removes the `$` around mathematics. A single `$` means money and is escaped as `\\$`."""
    positions = [position for position, sign in enumerate(text) if sign == "$" and text[position - 1:position] != "\\"]
    if len(positions) == 1:
        return text[:positions[0]] + "\\" + text[positions[0]:]
    return "".join(sign for position, sign in enumerate(text) if position not in positions) if positions else text


def _scan(text: str, grouping: bool) -> list[Token]:
    tokens: list[Token] = []
    position, spaced = 0, False
    while position < len(text):
        match = matched(_SCANNER, text, position)
        if match.lastgroup == "grouped" and not (grouping and not _alone_in_brackets(text, *match.span())):
            match = matched(_DIGITS, text, position)
        position, kind, value = match.end(), match.lastgroup or "", match.group()
        if kind == "space":
            spaced = True
            continue
        if kind == "text":
            position, value = _braced_text(text, position)
            kind = "words"
        new = list(_tokens_of(kind, value, tokens[-1] if tokens else None, spaced))
        tokens += [token._replace(spaced=spaced and not index) for index, token in enumerate(new)]
        spaced = spaced and not new
    return tokens


def _alone_in_brackets(text: str, start: int, end: int) -> bool:
    """Whether `1,234` is the whole content of brackets; then it is a pair of numbers."""
    return text[:start].rstrip().endswith(("(", "[", r"\{")) and text[end:].lstrip().startswith((")", "]", r"\}"))


def _braced_text(text: str, start: int) -> tuple[int, str]:
    """(end, content) of the group that starts at `start`. An unclosed group extends to the end of the text."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1, text[start + 1:position]
    return len(text), text[start + 1:]


def _tokens_of(kind: str, value: str, before: Token | None, spaced: bool):
    if kind == "degree":
        yield Token("command", r"\degree")
    elif kind == "prime":
        for _ in range(value.count("prime")):
            yield Token("sign", "'")
    elif kind == "repeating":
        whole, fixed, period = matched(_REPEATING, value).groups()
        yield Token("repeating", f"{whole or 0}.{fixed}({period})")
    elif kind in ("joined", "grouped"):
        yield Token("number", re.sub(r"[^\d.]", "", value))
    elif kind == "number":
        yield Token("number", value.lower().rstrip("."))
    elif kind == "edge":
        name = matched(_EDGE_NAME, value).group(1)
        yield Token("begin" if value.startswith(r"\begin") else "end", name)
    elif kind == "words":
        yield from _words(value if before else _ANSWER_PREFIX.sub("", value))
    elif kind == "word":
        yield from _letters(value, before, spaced)
    elif kind in ("command", "sign"):
        value = _SAME.get(value, value)
        yield Token("command" if value[0] == "\\" and value[1:2].isalpha() else "sign", value)


def _words(content: str):
    r"""Tokens of the content of `\text{...}`: mathematical tokens if the content is mathematics, else one token of words."""
    content = " ".join(re.sub(r"\\[,;:! ]|~|\$", " ", content).split())
    if not content:
        return
    if _ORDINAL.fullmatch(content):
        content = content[:-2]
    if content == "\\":  # left over from `\$`
        yield Token("sign", "$")
    elif content.lower() in NAMED:
        yield Token("command", NAMED[content.lower()])
    elif content in ("e", "i") or not any(sign.isalpha() for sign in content):
        yield from _scan(content, grouping=True)
    elif counted := _COUNTED.fullmatch(content):  # `5 apples`, `\$5 per day`
        if counted.group(1):
            yield Token("sign", "$")
        yield from _scan(counted.group(2), grouping=True)
        yield Token("word", counted.group(3), spaced=True)
    else:
        yield Token("word", content)


def _letters(run: str, before: Token | None, spaced: bool):
    """Tokens of a run of letters: a name of a function or constant, a word, a unit after a number or word, or variables."""
    lowered = run.lower()
    after_number = before is not None and (before.kind in ("number", "repeating", "word") or before.value in (")", "}"))
    attached = _FUNCTION_OF_ONE.fullmatch(run)
    if run in NAMED:
        yield Token("command", NAMED[run])
    elif attached:
        yield Token("command", NAMED[attached.group(1)])
        yield Token("letter", attached.group(2))
    elif (lowered in SEPARATORS or lowered in NUMBERS or lowered in SHORT_WORDS
          or (len(run) > 3 and not run.isupper() and not _is_product(run) and (spaced or not after_number))
          or (lowered in LINKS and spaced and before is not None and before.kind in ("word", "number"))
          or (before is not None and not spaced and _ORDINAL.fullmatch(before.value + run))
          or (singular(lowered) in (*BARE, "unit") and after_number and (spaced or lowered != "in"))):
        yield Token("word", run)
    else:
        for letter in run:
            yield Token("letter", letter)


def _is_product(run: str) -> bool:
    """Whether letters are a product of variables such as `abcd`: at least four, different, and consecutive in the alphabet."""
    places = sorted(map(ord, run))
    return len(run) > 3 and places == list(range(places[0], places[0] + len(run)))


def _joined(tokens: list[Token]) -> list[Token]:
    """Joins signs of two characters into one token, and adjacent words into one token."""
    joined: list[Token] = []
    for token in tokens:
        last = joined[-1] if joined else None
        if last is not None and not token.spaced and (last.value, token.value) in _PAIRS and last.kind != "word":
            value = _PAIRS[last.value, token.value]
            joined[-1] = Token("command" if value[0] == "\\" else "sign", value, last.spaced)
        elif (last is not None and last.kind == token.kind == "word"
              and not {last.value.lower(), token.value.lower()} & set(SEPARATORS)):
            joined[-1] = Token("word", f"{last.value} {token.value}", last.spaced)
        else:
            joined.append(token)
    return joined


OPENING = {"(": "()", "[": "[]", "{": "{}", r"\{": r"\{\}", r"\langle": "<>", r"\lfloor": "floor", r"\lceil": "ceil"}
CLOSING = {")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"}


FACING = "facing"
"""Token kind of a bracket that `facing` has turned around. It bounds an interval, never a point."""
_BEFORE = ("", r"\in", r"\cup", r"\cap", "=", ",", "or", "and")
_AFTER = ("", r"\cup", r"\cap", ",", ".", "or", "and")


def facing(tokens: Sequence[Token]) -> list[Token]:
    """The tokens with the intervals `]0,1[` and `[0,1[` rewritten as `(0,1)` and `[0,1)`."""
    values = ["", *(token.value for token in tokens), ""]
    turned = []
    for token, before, after in zip(tokens, values, values[2:], strict=False):
        opens, closes = token.value == "]" and before in _BEFORE, token.value == "[" and after in _AFTER
        turned.append(Token(FACING, "(" if opens else ")", token.spaced) if opens or closes else token)
    return turned


def depths(tokens: Sequence[Token]) -> list[int]:
    """Nesting depth of each token in brackets and environments. A bracket has the depth of its content.

    Unmatched closing brackets do not make the depth negative.
    """
    levels, depth = [], 0
    for token in tokens:
        opens = token.value in OPENING or token.kind == "begin"
        closes = token.value in CLOSING or token.kind == "end"
        depth += opens
        levels.append(depth)
        depth = max(0, depth - closes)
    return levels


def split(tokens: Sequence[Token], separates: Callable[[Token], bool]) -> tuple[list[list[Token]], list[Token]]:
    """(parts, separators): the tokens split at each separator outside brackets."""
    parts: list[list[Token]] = [[]]
    separators: list[Token] = []
    for token, depth in zip(tokens, depths(tokens), strict=True):
        if depth == 0 and separates(token):
            parts.append([])
            separators.append(token)
        else:
            parts[-1].append(token)
    return parts, separators


def enclosed(tokens: Sequence[Token]) -> tuple[str, list[Token]] | None:
    """(brackets, content) if one pair of brackets encloses all tokens, otherwise None. `[0,1)` is also a pair."""
    if len(tokens) < 2:
        return None
    first, last = tokens[0].value, tokens[-1].value
    if first not in OPENING or last not in CLOSING:
        return None
    inside = depths(tokens)
    if inside[-1] != 1 or min(inside) < 1:
        return None
    if any(before == 1 and token.value in CLOSING for token, before in zip(tokens[:-1], inside[:-1], strict=True)):
        return None
    kind = OPENING[first]
    if first in ("(", "[") and last in (")", "]"):
        kind = first + last
    elif {first: last} not in ({"{": "}"}, {r"\{": r"\}"}, {r"\langle": r"\rangle"}):
        return None
    return kind, list(tokens[1:-1])


_PREFIXED = {r"\over": r"\frac", r"\choose": r"\binom"}


def prefixed(tokens: Sequence[Token]) -> list[Token]:
    r"""The tokens with `\frac{1}{3}` instead of `{1 \over 3}`. An infix command that is not alone in its braces is kept."""
    tokens = list(tokens)
    for index in [index for index, token in enumerate(tokens) if token.value in _PREFIXED]:
        start, end = _edge(tokens, index, -1), _edge(tokens, index, 1)
        if start is None or end is None:
            continue
        parts, infix = split(tokens[start + 1:end], lambda token: token.value in _PREFIXED)
        if len(infix) == 1:
            command = Token("command", _PREFIXED[infix[0].value], tokens[start].spaced)
            return prefixed([*tokens[:start], command, *_group(parts[0]), *_group(parts[1]), *tokens[end + 1:]])
    return tokens


def _edge(tokens: Sequence[Token], position: int, step: int) -> int | None:
    """Position of the brace that opens (`step` -1) or closes (`step` 1) the group around a token; None for other brackets."""
    opening, closing = (OPENING, CLOSING) if step > 0 else (CLOSING, OPENING)
    depth, position = 0, position + step
    while 0 <= position < len(tokens):
        value = tokens[position].value
        if value in closing and depth == 0:
            return position if value in ("{", "}") else None
        depth += (value in opening) - (value in closing)
        position += step
    return None


def _group(tokens: Sequence[Token]) -> list[Token]:
    return [Token("sign", "{"), *tokens, Token("sign", "}")]
