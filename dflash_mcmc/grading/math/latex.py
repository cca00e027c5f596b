r"""An answer's LaTeX as tokens, its brackets, and its unit. Answers that differ only in appearance have the same tokens.

A token is a string: a number (`12.5`, `6.7e-5`, or `0.1(6)` with its period), a letter, a command (`\frac`), words after a
quote (`"square inches`), `\begin{...}` and `\end{...}`, or a sign. `\dfrac`, `\left`, Unicode signs and `sqrt(2)` have one
common form.
"""

import re
import tomllib
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

_SPELLINGS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("spellings.toml").read_text(encoding="utf-8"))
"""Words, units, signs and commands that the rules know. The file says what each list is for."""
_WORDS_OF: dict[str, list[str]] = {name: words.split() for name, words in _SPELLINGS["words"].items()}
FUNCTIONS = tuple(_WORDS_OF["functions"])
NAMED = {**{name: f"\\{name}" for name in FUNCTIONS}, **_SPELLINGS["commands"]}
SEPARATORS = ("and", "or")
NUMBERS = {word: number for number, word in enumerate(_WORDS_OF["numbers"])}
MULTIPLIERS: dict[str, int] = _SPELLINGS["multipliers"]
_UNIT_OF: dict[str, str] = {alias: unit for unit, others in _SPELLINGS["units"].items() for alias in (unit, *others.split())}
_MEANINGFUL = {*_WORDS_OF["meaningful"], *NUMBERS, *MULTIPLIERS, *_WORDS_OF["of_numbers"]}
_SYMBOLS = {alias for alias in _UNIT_OF if len(alias) > 1}.union(_WORDS_OF["symbols"])
BARE = frozenset(word for word in _UNIT_OF if len(word) > 1) | {"unit"}
"""Units that are recognised after a number without `\\text`. A single letter is a variable instead."""
_SIGNS = str.maketrans({pair[0]: f"{pair[1:]} ".replace("- ", "-") for pair in _WORDS_OF["signs"]}
                       | dict.fromkeys("“”\"\u200b\u200c\u200d\u2060\u2061\u2062\ufeff", ""))
_ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?|[a-zA-Z])")
_RUNS = re.compile("([⁰¹²³⁴-⁹⁺⁻ⁿ]+)|([₀-₉₊₋]+)|([¼-¾⅐-⅞])")


def _sign(run: re.Match) -> str:
    raised, lowered, fraction = run.groups()
    if fraction:
        value = Fraction(unicodedata.numeric(fraction)).limit_denominator(10)
        return rf" \frac{{{value.numerator}}}{{{value.denominator}}}"
    return f"{'^' if raised else '_'}{{{unicodedata.normalize('NFKC', raised or lowered)}}}".replace("−", "-")


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
    (r"(^|[,(\[]\s*)\+\s*(?=\\infty)", r"\1"), (r"\\([dtc]frac|[dt]binom)(?![a-zA-Z])", lambda found: "\\" + found[1][1:]),
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
_SAME = dict(zip(_WORDS_OF["aliases"][::2], _WORDS_OF["aliases"][1::2], strict=True))
_PAIRS = {("<", "="): r"\leq", (">", "="): r"\geq", ("!", "="): r"\neq", ("=", "="): "=", (r"\not", "="): r"\neq",
          (r"\cdot", r"\cdot"): "^"}


def tokenise(text: str, grouping: bool = True) -> list[str]:
    """Tokens of an answer. With `grouping`, the comma of `1,234` groups digits; otherwise it separates two numbers."""
    # The text with Unicode signs as LaTeX commands, and superscript and subscript digits as exponents and indices
    if not text.isascii():
        text = _RUNS.sub(_sign, _ROOT.sub(r"\\sqrt{\1}", text)).translate(_SIGNS)
        text = unicodedata.normalize("NFKC", text)
    text = " ".join(text.replace('"', "").split()) + " "
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
    tokens: list[str] = []
    place = -1
    for found in _TOKEN.finditer(written + text[end:]):
        token, last = found.group(), tokens[-1] if tokens else ""
        token = re.sub(r"\s|(?<=\})\{.*", "", token) if token.startswith((r"\begin", r"\end")) else _SAME.get(token, token)
        if is_word(token):
            token = '"' + token.strip('" ')
        elif is_number(token):
            token = token.lower().rstrip(".")
        if (last, token) in _PAIRS and found.start() == place:
            tokens[-1] = _PAIRS[last, token]
        elif is_word(token) and last and is_word(last) and not {last[1:].lower(), token[1:].lower()} & set(SEPARATORS):
            tokens[-1] += f" {token[1:]}"
        elif token != '"':
            tokens.append(token)
        place = found.end()
    # The intervals `]0,1[` and `[0,1[` become `⦅0,1⦆` and `[0,1⦆`, which can be no points.
    around = zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False)
    return ["⦅" if token == "]" and before in _OUTER else "⦆" if token == "[" and after in _OUTER else token
            for before, token, after in around]


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
    places = sorted(map(ord, run))
    product = places == list(range(places[0], places[0] + len(run)))  # of variables, such as `abcd`
    word = (lowered in (*SEPARATORS, *NUMBERS, *_WORDS_OF["short"])
            or (len(run) > 3 and not run.isupper() and not product and (spaced or not after_number))
            or (lowered in _WORDS_OF["links"] and spaced and bool(re.search(r'[\d"a-z]$', before)))
            or (not spaced and _ORDINAL.fullmatch(re.findall(r"\d*$", before)[0] + run))
            or (singular(lowered) in BARE and after_number and (spaced or lowered != "in"))
            or (run in ("h", "s") and bool(re.search(r'" ?/ ?$', before))))
    if run in NAMED:
        return f"{NAMED[run]} "
    if attached := _FUNCTION_OF_ONE.fullmatch(run):
        return f"{NAMED[attached[1]]} {attached[2]}"
    return f' "{run}" ' if word else run


def is_number(token: str) -> bool:
    """Whether a token is a number."""
    return token[0].isdigit() or (token[0] == "." and len(token) > 1)


def is_word(token: str) -> bool:
    """Whether a token is words."""
    return token[0] == '"'


OPENING = {"(": "(", "[": "[", "{": "{", r"\{": r"\{", r"\langle": "<", r"\lfloor": "floor", r"\lceil": "ceil", "⦅": "("}
CLOSING = {")": "(", "]": "[", "}": "{", r"\}": r"\{", r"\rangle": "<", r"\rfloor": "floor", r"\rceil": "ceil", "⦆": "("}
_OUTER = ("", r"\in", r"\cup", r"\cap", "=", ",", ".", '"or', '"and')


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


# Units beside a number.


def _is_meaningful(words: str) -> bool:
    """Whether words are more than a unit: they change the meaning of a number, contain a number, or may be variables."""
    parts = re.findall(r"\w+", re.sub(r"\bnon-(?=negative)", "non", words.lower()))
    while parts and singular(parts[0]) in MULTIPLIERS:
        parts = parts[1:]
    if parts[1:] and parts[0] == "positive":  # `6 positive divisors`; without a noun, `positive` is a sign
        parts = parts[1:]
    if len(parts) == 1 and len(parts[0]) < 3 and not {words.strip(" ."), parts[0] * (len(parts[0]) - 1)} & _SYMBOLS:
        return True
    return any({word, singular(word)} & _MEANINGFUL or re.fullmatch(r"\d.*|\w*illi(on|ard)s?", word)
               or (re.fullmatch(r"\w+ths?", word) and singular(word) not in _WORDS_OF["nouns"]) for word in parts)


def _unit_of(words: str) -> tuple[str, int]:
    """(unit, power) of a phrase such as `square inches`. All spellings give one name; words like `total` give ""."""
    parts = [part for part in re.split(r"[\s-]+", words.lower().replace("/", " per ")) if part.strip(".")]
    power = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}.get(parts[0].strip("."), 1) if len(parts) > 1 else 1
    parts = [singular(part.strip(".")) for part in parts[power > 1:]]
    name = " ".join(_UNIT_OF.get(part, part) for part in parts if part not in _WORDS_OF["without_meaning"])
    return _SPELLINGS["phrases"].get(name, name), power


def singular(word: str) -> str:
    """The singular of a word: `meter` for `meters`."""
    regular = len(word) > 3 and word.endswith("s") and not word.endswith("ss")
    return _SPELLINGS["plurals"].get(word) or (word[:-1] if regular else word)


PERCENT, DEGREE = "percent", "degree"
_CURRENCIES: dict[str, str] = _SPELLINGS["currencies"]
_TRIGONOMETRIC = {rf"\{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}


class Measured(NamedTuple):
    """Tokens without the unit beside them, the unit and its power, and the factor of words (1000 for `5 thousand`)."""

    tokens: tuple[str, ...]
    unit: str = ""
    power: int = 1
    factor: int = 1

    def fits(self, other: "Measured") -> bool:
        """Whether the units are the same, or one answer leaves its unit out. A plain `degree` fits those of temperature."""
        names = self.unit, other.unit
        same = names[0] == names[1] and self.power == other.power
        return not all(names) or same or (DEGREE in names and all(name.startswith(DEGREE) for name in names))


_TRAILING = re.compile(  # what stands at the end of tokens that are joined by line feeds
    r'\n(?:(?P<percent>%)|\\degree(?:\n(?P<scale>[CF]))?|\\pmod\n(?:(?P<modulus>\d+)|\{\n(?P<group>\d+)\n\})'
    r'|(?P<aside>\(\n"[^\n]*\n\)))$'
    r'|(?P<phrase>(?:\n"(?!(?i:and|or)(?:\n|$))[^\n]*(?:\n\^\n(?:\d+|\{\n\d+\n\}))?(?:\n(?:/|\\cdot)(?=\n"))?)+$)')


def measured(tokens: Sequence[str]) -> Measured:
    """Separates the unit from an answer. If no number would remain, the tokens are returned unchanged, without a unit."""
    core, units, factor = list(tokens), [], 1
    for place in (int(core[:1] == ["-"]), -1):
        if core[place:] and core[place] in _CURRENCIES:
            units.append((_CURRENCIES[core.pop(place)], 1))
    text, beside = "".join(f"\n{token}" for token in core), len(units)
    while found := _TRAILING.search(text):
        words = re.findall(r'"([^\n]*)', found.group())
        if found["percent"] and not units[beside:]:
            trailing = PERCENT, 1
        elif found.group() == "\n\\degree" and (DEGREE, 1) not in units and not set(core) & _TRIGONOMETRIC:
            trailing = DEGREE, 1
        elif found["scale"]:
            trailing = f"{DEGREE} {found['scale'].lower()}", 1
        elif (modulus := found["modulus"] or found["group"]) and re.fullmatch(r"(?:\n-)?\n\d+", text[:found.start()]):
            trailing = f"mod {modulus}", 1
        elif words and not _is_meaningful(" ".join(words)):
            exponents, parts = re.findall(r"\n(\d+)", found.group()), " ".join(words).replace("/", " / ").split()
            while parts and singular(parts[0].lower()) in MULTIPLIERS:
                factor *= MULTIPLIERS[singular(parts.pop(0).lower())]
            name, power = _unit_of(" / ".join(words) if "\n/" in found.group() else " ".join(parts))
            trailing = name, int(exponents[0]) if len(exponents) == 1 else power
        else:
            break
        text = text[:found.start()]
        units = [*units[:beside], trailing, *units[beside:]] if trailing[0] else units
    core = text.split("\n")[1:]
    if not core or core[-1] in (r"\frac", r"\sqrt"):
        return Measured(tuple(tokens))
    names = list(dict.fromkeys(name for name, _ in units))
    return Measured(tuple(core), " ".join(names), units[-1][1] if units else 1, factor)
