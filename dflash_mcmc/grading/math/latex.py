r"""The tokens of an answer's LaTeX, and their brackets. Answers that differ only in appearance have the same tokens.

A token is a string: a number (`12.5`, `6.7e-5`, or `0.1(6)` with its period), a letter, a command (`\frac`), words after a
quote (`"square inches`), `\begin{...}` and `\end{...}`, or a sign. `\dfrac`, `\left`, Unicode signs and `sqrt(2)` have one
common form.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction

from dflash_mcmc.grading.math.units import BARE, FUNCTIONS, LINKS, NAMED, NUMBERS, SEPARATORS, SHORT_WORDS, singular

_UNICODE = (
    r"−- –- —- ‐- ‑- ﹣- ⋅\cdot ·\cdot ∙\cdot •\cdot °^\circ º^\circ ˚^\circ ′' ’' ‘' ″'' ×\times ∗* ÷/ ∕/ ⁄/ ±\pm "
    r"∓\mp ≤\leq ≦\leq ⩽\leq ≥\geq ≧\geq ⩾\geq ≠\neq ≈\approx ≡\equiv ∈\in ∪\cup ∩\cap ∅\emptyset ∞\infty "
    r"ℝ\mathbb{R} ℤ\mathbb{Z} ℕ\mathbb{N} ℚ\mathbb{Q} ℂ\mathbb{C} √\sqrt ∛\sqrt[3] ∜\sqrt[4] ∘\circ ⟨\langle "
    r"⟩\rangle …\ldots ⋯\ldots ∠\angle △\triangle →\to ∑\sum ∏\prod ∫\int ％\% ＄\$ ｛\{ ｝\} 、, 。. ϕ\phi ϵ\epsilon "
    r"λ\lambda Λ\Lambda")
_SIGNS = str.maketrans({pair[0]: f"{pair[1:]} ".replace("- ", "-") for pair in _UNICODE.split()}
                       | dict.fromkeys("“”\"\u200b\u200c\u200d\u2060\u2061\u2062\ufeff", ""))
_ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?|[a-zA-Z])")
_GREEK = re.compile("[Α-Ωα-ω]")
_RUNS = re.compile("([⁰¹²³⁴-⁹⁺⁻ⁿ]+)|([₀-₉₊₋]+)|([¼-¾⅐-⅞])")


def _sign(run: re.Match) -> str:
    raised, lowered, fraction = run.groups()
    if fraction:
        value = Fraction(unicodedata.numeric(fraction)).limit_denominator(10)
        return rf" \frac{{{value.numerator}}}{{{value.denominator}}}"
    return f"{'^' if raised else '_'}{{{unicodedata.normalize('NFKC', raised or lowered)}}}".replace("−", "-")


def _ascii(text: str) -> str:
    """The text with Unicode signs as LaTeX commands, and superscript and subscript digits as exponents and indices."""
    if not text.isascii():
        text = _RUNS.sub(_sign, _ROOT.sub(r"\\sqrt{\1}", text)).translate(_SIGNS)
        text = _GREEK.sub(lambda letter: "\\" + _capital(*unicodedata.name(letter.group()).split()[1::2]) + " ", text)
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.replace('"', "").split()) + " "


def _capital(case: str, name: str) -> str:
    return name.capitalize() if case == "CAPITAL" else name.lower()


_THIN = r"(?:\{\s*,\s*\}|,\s*\\!\s*|\\[,;:! ]\s*|~|[ ])"
_TEXT = r"text|mbox|hbox|textrm|textbf|textit|textnormal|textsf|texttt|textup|mathrm|mathsf|mathtt|emph|operatorname"
_REWRITES = [(re.compile(pattern, re.IGNORECASE if "nswer" in pattern else 0), form) for pattern, form in (
    (r"^\s*(?:the )?(?:final )?answer(?: is)?\s*:\s*", ""), (r"^\*\*(.+)\*\*\s*$", r"\1"), (r"\.\.\.", r"\\ldots "),
    (r"\b(sq|cu)\.(?=\s*[a-zA-Z])", r"\1"), (r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm)\s*\]", r"\\\\"),
    (r"(?<!\\)\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?", ""), (r"\\(?:textcolor|color)\s*\{[a-zA-Z]+\}", ""),
    (r"\\(?:(?:display|text|script)style|(?:no)?limits|boldmath|bf|rm|it|tt|mathbf|boldsymbol|bm|pmb|mathit|mathnormal"
     r"|ensuremath|underline|boxed|fbox|nonumber)(?![a-zA-Z])|(?<!\\)\\[()\[\]]", ""),
    (rf"\^\s*\{{?\s*\\(?:{_TEXT}|textsuperscript)\s*\{{\s*(?:st|nd|rd|th)\s*\}}\s*\}}?|(?<=\d)\^\{{\s*th\s*\}}", ""),
    (r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![a-zA-Z]))|\\(?:degree|textdegree)(?![a-zA-Z])", r"\\degree "),
    (r"\^\s*(?:\{\s*((?:\\prime\s*)+)\}|(\\prime)(?![a-zA-Z]))", lambda found: "'" * found.group().count("prime")),
    (r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))",
     lambda found: f"{found[1] or 0}.{found[2]}({found[3] or found[4]})"),
    (rf"(?<![\d.,])\d{{1,3}}(?:{_THIN}\d{{3}})+(?!\d)(?:\.\d+)?", lambda found: re.sub(r"[^\d.]", "", found.group())),
    (r"(?<!\\)\\(?:[,;:>! ]|(?:q?quad|enspace|thinspace|space|hfill|newline)(?![a-zA-Z])"
     r"|[hv]?(?:space|phantom)\s*\*?\{[^{}]*\})|~", " "),
    (r"\\([dtc]frac|[dt]binom)(?![a-zA-Z])", lambda found: "\\" + found[1][1:]),
)]
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)(?:\.\d+)?")
_WORDS = re.compile(rf"\\(?:{_TEXT})\*?\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)(?:\}}|$)")
_COUNTED = re.compile(r"(\\?\$ ?)?(-?[\d.,/:]*\d)\s+([a-zA-Z][a-zA-Z. ]*)")
_ORDINAL = re.compile(r"\d*(?:(?<!1)1st|(?<!1)2nd|(?<!1)3rd|\dth)")
_MIXED = re.compile(r"(?<![\d.}^_\\(])(\d+)\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))(?!\s*\^)"
                    r"|(?<![\d.}^_])(\d+) +(\d+)/(\d+)(?![\d^])")
_SIDE = r"((?:(?!\\over|\\choose)[^{}]|\{[^{}]*\})*)"
_INFIX = re.compile(rf"\{{{_SIDE}\\(over|choose)(?![a-z]){_SIDE}\}}")
_PREFIX = {"over": r"\frac", "choose": r"\binom"}
_RUN = re.compile(r'"[^"]*"|\\[a-zA-Z]+(?:\s*\{[a-zA-Z]+\*?\})?|\d[eE][+-]?\d+|[a-zA-Z]+')
_FUNCTION_OF_ONE = re.compile(rf"({'|'.join(FUNCTIONS)}|pi|sqrt)([a-zA-Z])")
_NUMBER = (r"\d*\.\d*\(\d+\)|(?:\d+\.\d+|\.\d+|(?<![\d.])1)[eE][+-]?\d+(?![\d.a-zA-Z])|\d+[eE]\d+(?![\d.a-zA-Z])"
           r"|\d+(?:\.\d*)?|\.\d+")
_TOKEN = re.compile(
    rf'"[^"]*"|{_NUMBER}|\\(?:begin|end)\s*\{{\s*[a-zA-Z]+\*?\s*\}}(?:\s*\{{[lcr|\s]*\}})?|\\[a-zA-Z]+\*?|\\.|\S')
_ALIASES = (
    r"\lbrace \{ \rbrace \} \lbrack [ \rbrack ] \lvert | \rvert | \vert | \mid | \le \leq \leqslant \leq \leqq \leq "
    r"\ge \geq \geqslant \geq \geqq \geq \ne \neq \lt < \gt > \times \cdot \ast \cdot * \cdot \div / \dots \ldots "
    r"\cdots \ldots \varnothing \emptyset \prime ' \colon : \bar \overline \% % \$ $ \& & \# # \simeq \approx \tg "
    r"\tan \ctg \cot \arctg \arctan \cosec \csc \varphi \phi \varepsilon \epsilon \vartheta \theta \to \rightarrow")
_SAME = dict(zip(_ALIASES.split()[::2], _ALIASES.split()[1::2], strict=True))
_PAIRS = {("<", "="): r"\leq", (">", "="): r"\geq", ("!", "="): r"\neq", ("=", "="): "=", (r"\not", "="): r"\neq",
          (r"\cdot", r"\cdot"): "^"}


def tokenise(text: str, grouping: bool = True) -> list[str]:
    """Tokens of an answer. With `grouping`, the comma of `1,234` groups digits; otherwise it separates two numbers."""
    text = _ascii(text)
    if r"\\" in text and r"\begin" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text)  # `\\\\frac`, as models write it in JSON
    for pattern, form in _REWRITES:
        text = pattern.sub(form, text)
    dollars = [found.start() for found in re.finditer(r"(?<!\\)\$", text)]  # a single one means money
    text = text if len(dollars) == 1 else re.sub(r"(?<!\\)\$", "", text)
    text = _WORDS.sub(_words, text)
    if grouping:
        text = _GROUPED.sub(_ungrouped, text)
    while _INFIX.search(text):
        text = _INFIX.sub(lambda found: rf"{_PREFIX[found[2]]}{{{found[1]}}}{{{found[3]}}}", text)
    text, written, end = _MIXED.sub(_mixed, text), "", 0
    for run in _RUN.finditer(text):
        written += text[end:run.start()]
        written += _letters(run.group(), written)
        end = run.end()
    return _facing(_joined(written + text[end:]))


def _ungrouped(found: re.Match) -> str:
    """`1,234` as one number, unless it is the whole content of brackets, which is a pair."""
    before, after = found.string[:found.start()].rstrip(), found.string[found.end():].lstrip()
    alone = before.endswith(("(", "[", r"\{")) and after.startswith((")", "]", r"\}"))
    return found.group() if alone else found.group().replace(",", "")


def _mixed(found: re.Match) -> str:
    """A mixed number as a fraction: `1\\frac{4}{5}` is 9/5. The fraction must be proper."""
    whole, over, under = (int(part) for part in found.groups() if part)
    return rf"\frac{{{whole * under + over}}}{{{under}}}" if 0 < over < under else found.group()


def _words(found: re.Match) -> str:
    r"""The content of `\text{...}`: mathematics if it is that, otherwise words in quotes."""
    content = " ".join(re.sub(r"\\[,;:! ]|~|(?<!\\)\$", " ", found[1]).split())
    content = _REWRITES[0][0].sub("", content) if not found.string[:found.start()].strip() else content
    content = content[:-2] if _ORDINAL.fullmatch(content) else content
    if content.lower() in NAMED:
        return f" {NAMED[content.lower()]} "
    if content in ("e", "i", r"\$", "\\") or not any(sign.isalpha() for sign in content):
        return r"\$" if content == "\\" else f" {content} "
    if counted := _COUNTED.fullmatch(content):  # `5 apples`, `\$5 per day`
        return f'{counted[1] or ""}{counted[2]} "{counted[3]}"'
    return f' "{content}" '


def _letters(run: str, text: str) -> str:
    """A run of letters after a text as a command, words, or variables."""
    if not run[0].isalpha():
        return run
    lowered, before = run.lower(), text.rstrip()
    spaced, after_number = before != text, before[-1:].isdigit() or before[-1:] in tuple('").}')
    word = (lowered in (*SEPARATORS, *NUMBERS, *SHORT_WORDS)
            or (len(run) > 3 and not run.isupper() and not _is_product(run) and (spaced or not after_number))
            or (lowered in LINKS and spaced and bool(re.search(r'[\d"a-z]$', before)))
            or (not spaced and _ORDINAL.fullmatch(re.findall(r"\d*$", before)[0] + run))
            or (singular(lowered) in BARE and after_number and (spaced or lowered != "in"))
            or (run in ("h", "s") and bool(re.search(r'" ?/ ?$', before))))
    if run in NAMED:
        return f"{NAMED[run]} "
    if attached := _FUNCTION_OF_ONE.fullmatch(run):
        return f"{NAMED[attached[1]]} {attached[2]}"
    return f' "{run}" ' if word else run


def _is_product(run: str) -> bool:
    """Whether letters are a product of variables such as `abcd`: different, and consecutive in the alphabet."""
    places = sorted(map(ord, run))
    return places == list(range(places[0], places[0] + len(run)))


def is_number(token: str) -> bool:
    """Whether a token is a number."""
    return token[0].isdigit() or (token[0] == "." and len(token) > 1)


def is_word(token: str) -> bool:
    """Whether a token is words."""
    return token[0] == '"'


def _joined(text: str) -> list[str]:
    """The tokens of rewritten text, with signs of two characters joined, and adjacent words too."""
    joined: list[str] = []
    end = -1
    for found in _TOKEN.finditer(text):
        token, last = found.group(), joined[-1] if joined else ""
        token = re.sub(r"\s|(?<=\})\{.*", "", token) if token.startswith((r"\begin", r"\end")) else _SAME.get(token, token)
        if is_word(token):
            token = token[:-1].strip()
        elif is_number(token):
            token = token.lower().rstrip(".")
        if (last, token) in _PAIRS and found.start() == end:
            joined[-1] = _PAIRS[last, token]
        elif is_word(token) and last and is_word(last) and not {last[1:].lower(), token[1:].lower()} & set(SEPARATORS):
            joined[-1] += f" {token[1:].strip()}"
        elif token != '"':
            joined.append('"' + token[1:].strip() if is_word(token) else token)
        end = found.end()
    return joined


OPENING = {"(": "(", "[": "[", "{": "{", r"\{": r"\{", r"\langle": "<", r"\lfloor": "floor", r"\lceil": "ceil", "⦅": "("}
CLOSING = {")": "(", "]": "[", "}": "{", r"\}": r"\{", r"\rangle": "<", r"\rfloor": "floor", r"\rceil": "ceil", "⦆": "("}
_OUTER = ("", r"\in", r"\cup", r"\cap", "=", ",", ".", '"or', '"and')


def _facing(tokens: list[str]) -> list[str]:
    """The tokens with the intervals `]0,1[` and `[0,1[` rewritten as `⦅0,1⦆` and `[0,1⦆`, which can be no points."""
    around = zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False)
    return ["⦅" if token == "]" and before in _OUTER else "⦆" if token == "[" and after in _OUTER else token
            for before, token, after in around]


def depths(tokens: Sequence[str]) -> list[int]:
    """Nesting depth of each token in brackets and environments. A bracket has the depth of its content."""
    levels, depth = [], 0
    for token in tokens:
        depth += token in OPENING or token.startswith(r"\begin{")
        levels.append(depth)
        depth = max(0, depth - (token in CLOSING or token.startswith(r"\end{")))
    return levels


def split(tokens: Sequence[str], separates: Callable[[str], bool]) -> tuple[list[list[str]], list[str]]:
    """(parts, separators): the tokens split at each separator outside brackets."""
    parts: list[list[str]] = [[]]
    separators: list[str] = []
    for token, depth in zip(tokens, depths(tokens), strict=True):
        if depth == 0 and separates(token):
            parts.append([])
            separators.append(token)
        else:
            parts[-1].append(token)
    return parts, separators


def enclosed(tokens: Sequence[str]) -> tuple[str, list[str]] | None:
    r"""(brackets, content) if one pair of brackets encloses all tokens, else None. Brackets are `()`, `[)`, `\{\{`, `<<`."""
    if len(tokens) < 2 or tokens[0] not in OPENING or tokens[-1] not in CLOSING:
        return None
    inside = depths(tokens)
    if inside[-1] != 1 or any(depth == 1 and token in CLOSING for token, depth in zip(tokens[:-1], inside[:-1], strict=True)):
        return None
    first, last = OPENING[tokens[0]], CLOSING[tokens[-1]]
    if first in "([" and last in "([":
        return first + {"(": ")", "[": "]"}[last], list(tokens[1:-1])
    return (f"{first}{first}", list(tokens[1:-1])) if first == last else None
