"""Units beside a number: money, percent, degrees, other units, and words such as `million` that are part of the number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from dflash_mcmc.grading.math.tokens import Token
from dflash_mcmc.grading.math.words import MEANINGFUL, MULTIPLIERS, SEPARATORS, is_number_word, is_symbol, singular, unit_of

_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "¢": "cent", r"\pounds": "pound sterling",
               r"\euro": "euro"}
_TRIGONOMETRIC = {rf"\{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
PERCENT, DEGREE = "percent", "degree"


class MeasureUnit(NamedTuple):
    """A unit of measurement, to the power `exponent`. `name` is empty if an answer has no unit."""

    name: str = ""
    exponent: int = 1

    def fits(self, other: MeasureUnit) -> bool:
        """Whether two answers with these units can be equal: the units are the same, or one answer leaves its unit out.

        A plain `degree` also fits `degree c` and `degree f`.
        """
        if not self.name or not other.name or self == other:
            return True
        degrees = {self.name, other.name}
        return DEGREE in degrees and all(name.startswith(DEGREE) for name in degrees)


class MeasuredNumber(NamedTuple):
    """The tokens of a number without its unit, the unit, and a factor."""

    tokens: tuple[Token, ...]
    unit: MeasureUnit
    multiplier: int
    """The factor of words such as `thousand`; 1 without such words."""


def measured(tokens: Sequence[Token]) -> MeasuredNumber:
    """Separates the unit from an answer. If no number would remain, the tokens are returned unchanged, without a unit."""
    core, unit, multiplier = list(tokens), MeasureUnit(), 1
    core, money = _without_currency(core)
    while core:
        end = _phrase_start(core)
        if core[-1].value == "%" and unit.name != PERCENT:
            core, found = core[:-1], MeasureUnit(PERCENT)
        elif core[-1].value == r"\degree" and unit.name != DEGREE and not any(token.value in _TRIGONOMETRIC for token in core):
            core, found = core[:-1], MeasureUnit(DEGREE)
        elif len(core) > 2 and core[-2].value == r"\degree" and core[-1].value in ("C", "F"):
            core, found = core[:-2], MeasureUnit(f"{DEGREE} {core[-1].value.lower()}")
        elif modulus := _modulus(core):
            core, found = core[:-len(modulus)], MeasureUnit("mod " + "".join(modulus[1:]).strip("{}"))
        elif [token.value for token in core[-3::2]] == ["(", ")"] and core[-2].kind == "word" and not _meaningful(core[-2:-1]):
            core = [*core[:-3], core[-2]]  # `18 (dollars)`
            continue
        elif end < len(core) and not _meaningful(core[end:]):
            factor, found = _unit(core[end:])
            core, multiplier = core[:end], multiplier * factor
        else:
            break
        unit = _combined(found, unit)
    if not core or (core[-1].kind == "command" and core[-1].value in ("\\frac", "\\sqrt")):
        return MeasuredNumber(tuple(tokens), MeasureUnit(), 1)
    return MeasuredNumber(tuple(core), _combined(money, unit), multiplier)


def _combined(a: MeasureUnit, b: MeasureUnit) -> MeasureUnit:
    """The unit of `a` followed by `b`, e.g. `degree` and `celsius`. One of them may be empty."""
    if a.name == b.name or not b.name:
        return a
    return b if not a.name else MeasureUnit(f"{a.name} {b.name}", b.exponent)


def _without_currency(core: list[Token]) -> tuple[list[Token], MeasureUnit]:
    for place in (0, 1):
        if len(core) > place + 1 and core[place].value in _CURRENCIES and (place == 0 or core[0].value == "-"):
            return core[:place] + core[place + 1:], MeasureUnit(_CURRENCIES[core[place].value])
    if len(core) > 1 and core[-1].value in _CURRENCIES:
        return core[:-1], MeasureUnit(_CURRENCIES[core[-1].value])
    return core, MeasureUnit()


def _phrase_start(core: list[Token]) -> int:
    """Start of the phrase at the end of `core`: words, their exponents, and `/` or `\\cdot` between words."""
    end = len(core)
    while end:
        if core[end - 1].kind == "word":
            if core[end - 1].value.lower() in SEPARATORS:
                break
            end -= 1
        elif end < len(core) and end > 1 and core[end - 1].value in ("/", r"\cdot") and core[end - 2].kind == "word":
            end -= 1
        elif (exponent := _exponent(core[:end])) and end > exponent and core[end - exponent - 1].kind == "word":
            end -= exponent
        else:
            break
    return end


def _meaningful(phrase: list[Token]) -> bool:
    """Whether words are more than a unit: they are in MEANINGFUL, contain a number, or may be variables."""
    phrase_text = " ".join(token.value for token in phrase if token.kind == "word")
    words = re.findall(r"\w+", re.sub(r"\b(non)-(?=negative)", r"\1", phrase_text, flags=re.IGNORECASE))
    while words and singular(words[0].lower()) in MULTIPLIERS:
        words = words[1:]
    if words[1:] and words[0].lower() == "positive":  # `6 positive divisors`; without a noun, `positive` is a sign
        words = words[1:]
    if len(words) == 1 and len(words[0]) < 3 and not is_symbol(words[0]):  # possibly a product of variables
        return True
    return any({word.lower(), singular(word.lower())} & MEANINGFUL or word[0].isdigit() or is_number_word(word)
               for word in words)


def _modulus(core: list[Token]) -> list[str]:
    r"""The values of a trailing `\pmod 7` or `\pmod{7}`, if only an integer precedes it; otherwise an empty list."""
    values = [token.value for token in core]
    start = values.index(r"\pmod") if r"\pmod" in values else 0
    if not re.fullmatch(r"-?\d+", "".join(values[:start])) or not re.fullmatch(r"\d+|\{\d+\}", "".join(values[start + 1:])):
        return []
    return values[start:]


def _exponent(core: list[Token]) -> int:
    """Number of tokens in a trailing exponent, `^2` or `^{2}`; 0 if there is none."""
    values = [token.value for token in core[-4:]]
    if len(values) >= 2 and values[-2] == "^" and values[-1].isdigit():
        return 2
    if len(values) == 4 and values[0] == "^" and values[1] == "{" and values[2].isdigit() and values[3] == "}":
        return 4
    return 0


def _unit(phrase: list[Token]) -> tuple[int, MeasureUnit]:
    """(multiplier, unit) of words and exponents."""
    exponents = [int(token.value) for token in phrase if token.kind == "number"]
    words = " ".join(token.value for token in phrase if token.kind == "word" or token.value == "/").split()
    factor = 1
    while words and singular(words[0].lower()) in MULTIPLIERS:
        factor *= MULTIPLIERS[singular(words.pop(0).lower())]
    name, exponent = unit_of(" ".join(words))
    return factor, MeasureUnit(name, (exponents[-1] if exponents and len(exponents) == 1 else exponent) if name else 1)
