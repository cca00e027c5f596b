"""Words that occur in answers: names of functions, numbers, separators of two answers, and the units beside a number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

FUNCTIONS = ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln",
             "exp")
NAMED = {**{name: f"\\{name}" for name in FUNCTIONS}, "sqrt": r"\sqrt", "pi": r"\pi", "infinity": r"\infty",
         "infty": r"\infty", "inf": r"\infty", "oo": r"\infty", "frac": r"\frac", "theta": r"\theta", "alpha": r"\alpha",
         "beta": r"\beta", "gamma": r"\gamma", "omega": r"\omega", "lambda": r"\lambda", "phi": r"\phi"}
"""Words that models write instead of a LaTeX command."""



def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SEPARATORS = ("and", "or")
NUMBERS = {word: number for number, word in enumerate((
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"))}
MULTIPLIERS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_NUMBER_WORDS = {*NUMBERS, *MULTIPLIERS} | _words(
    "thirty forty fifty sixty seventy eighty ninety lakh lac crore gross score myriad googol")
_UNITS = {
    "mm": "millimeter millimetre mm", "cm": "centimeter centimetre cm", "m": "meter metre m", "km": "kilometer kilometre km",
    "in": "inch in", "ft": "foot feet ft", "yd": "yard yd", "mi": "mile mi", "g": "gram gramme gm g", "kg": "kilogram kg",
    "mg": "milligram mg", "lb": "pound lb", "oz": "ounce oz", "s": "second sec s", "min": "minute min", "h": "hour hr h",
    "day": "day", "week": "week wk", "month": "month mo", "year": "year yr", "l": "liter litre l",
    "ml": "milliliter millilitre ml", "gal": "gallon gal", "mph": "mph", "kmh": "kmh kph", "dollar": "dollar usd buck",
    "cent": "cent", "euro": "euro eur",
    "degree": "degree deg", "percent": "percent pct percentage", "radian": "radian rad", "hz": "hertz hz", "j": "joule",
    "acre": "acre", "quart": "quart qt", "pint": "pint pt", "cup": "cup", "am": "am a.m", "pm": "pm p.m",
}
_PLURALS = {"inches": "inch", "feet": "foot", "centuries": "century", "pennies": "cent", "penny": "cent"}
_UNIT_OF = {alias: unit for unit, aliases in _UNITS.items() for alias in aliases.split()}
_PHRASES = {"mi per h": "mph", "km per h": "kmh", "degree fahrenheit": "degree f", "degree celsius": "degree c"}
_WITHOUT_MEANING = _words("of the a an unit th st nd rd total approximately about exactly only")
"""Words that add nothing to the number beside them."""
_MEANINGFUL = _words(
    "or and not no none more less than least most above below over under if when while where to minus plus negative "
    "positive mod modulo base remainder divided squared cubed except without true false is are was wrong incorrect never "
    "factorial choose times halves half third quarter mille permille permil repeating recurring binary octal hexadecimal "
    "hex tens bn mn mil rejected extraneous invalid excluded undefined inverse doubled tripled halved fewer fails")
"""Words that change the meaning of a number beside them, so that they are no unit. Numbers are found by their form."""
_SYMBOLS = {alias for alias in _UNIT_OF if len(alias) > 1} | _words(
    "m g s h l L J N W V C F am pm AM PM st nd rd th cc dB Pa eV kW MW mW kV mV mA kJ MJ kN GB MB kB KB TB ha cl dl dm nm BC "
    "AD CE")
"""Words of one or two letters that are units. Other short words may be variables, or mean thousand."""
_NOUNS = _words(
    "month tooth teeth length width depth breadth path bath booth cloth moth birth death youth earth north south math "
    "health wealth growth truth strength myth mouth breath with both worth")
"""Words in -th that are not fractions."""
SHORT_WORDS = frozenset(("yes", "no", "odd", "all"))
"""Short words that are answers, not products of variables."""
LINKS = ("of", "per", "sq", "cu", "for")
"""Short words between or before units, which are not variables."""
BARE = frozenset(word for word in _UNIT_OF if len(word) > 1) | {"unit"}
"""Units that are recognised after a number without `\\text`. A single letter is a variable instead."""


def _is_meaningful(words: str) -> bool:
    """Whether words are more than a unit: they change the meaning of a number, contain a number, or may be variables."""
    parts = re.findall(r"\w+", re.sub(r"\bnon-(?=negative)", "non", words.lower()))
    while parts and singular(parts[0]) in MULTIPLIERS:
        parts = parts[1:]
    if parts[1:] and parts[0] == "positive":  # `6 positive divisors`; without a noun, `positive` is a sign
        parts = parts[1:]
    if len(parts) == 1 and len(parts[0]) < 3 and not {words.strip(" ."), parts[0] * (len(parts[0]) - 1)} & _SYMBOLS:
        return True
    return any({word, singular(word)} & (_MEANINGFUL | _NUMBER_WORDS) or re.fullmatch(r"\d.*|\w*illi(on|ard)s?", word)
               or (re.fullmatch(r"\w+ths?", word) and singular(word) not in _NOUNS) for word in parts)


def _unit_of(words: str) -> tuple[str, int]:
    """(unit, power) of a phrase such as `square inches`. All spellings give one name; words like `total` give ""."""
    parts = [part for part in re.split(r"[\s-]+", words.lower().replace("/", " per ")) if part.strip(".")]
    power = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}.get(parts[0].strip("."), 1) if len(parts) > 1 else 1
    parts = [singular(part.strip(".")) for part in parts[power > 1:]]
    name = " ".join(_UNIT_OF.get(part, part) for part in parts if part not in _WITHOUT_MEANING)
    return _PHRASES.get(name, name), power


def singular(word: str) -> str:
    """The singular of a word: `meter` for `meters`."""
    return _PLURALS.get(word) or (word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word)


PERCENT, DEGREE = "percent", "degree"
_CURRENCIES = {"$": "dollar", "€": "euro", r"\euro": "euro", "£": "pound sterling", r"\pounds": "pound sterling", "¥": "yen",
               "¢": "cent"}
_TRIGONOMETRIC = {rf"\{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}


class Measured(NamedTuple):
    """Tokens without the unit beside them, the unit and its power, and the factor of words (1000 for `5 thousand`)."""

    tokens: tuple[str, ...]
    unit: str = ""
    power: int = 1
    factor: int = 1

    def fits(self, other: Measured) -> bool:
        """Whether the units are the same, or one answer leaves its unit out. A plain `degree` fits those of temperature."""
        names = self.unit, other.unit
        same = names[0] == names[1] and self.power == other.power
        return not all(names) or same or (DEGREE in names and all(name.startswith(DEGREE) for name in names))


def measured(tokens: Sequence[str]) -> Measured:
    """Separates the unit from an answer. If no number would remain, the tokens are returned unchanged, without a unit."""
    core, units, factor = list(tokens), [], 1
    sign = core[:1] if core[:1] == ["-"] else []
    if core[len(sign):] and core[len(sign)] in _CURRENCIES:
        units.append((_CURRENCIES[core.pop(len(sign))], 1))
    if core and core[-1] in _CURRENCIES:
        units.append((_CURRENCIES[core.pop()], 1))
    beside = len(units)
    while core:
        end = _phrase_start(core)
        words = " ".join(token[1:] for token in core[end:] if token[0] == '"')
        if core[-1] == "%" and not units[beside:]:
            core, trailing = core[:-1], (PERCENT, 1)
        elif core[-1] == r"\degree" and (DEGREE, 1) not in units and not set(core) & _TRIGONOMETRIC:
            core, trailing = core[:-1], (DEGREE, 1)
        elif core[-2:-1] == [r"\degree"] and core[-1] in ("C", "F"):
            core, trailing = core[:-2], (f"{DEGREE} {core[-1].lower()}", 1)
        elif modulus := re.fullmatch(r"(-?\d+)\\pmod(\d+|\{\d+\})", "".join(core)):
            core, trailing = core[:core.index(r"\pmod")], (f"mod {modulus[2].strip('{}')}", 1)
        elif core[-3::2] == ["(", ")"] and core[-2][0] == '"' and not _is_meaningful(core[-2][1:]):  # `18 (dollars)`
            core, trailing = [*core[:-3], core[-2]], ("", 1)
        elif end < len(core) and not _is_meaningful(words):
            exponents, parts = [int(token) for token in core[end:] if token.isdigit()], words.replace("/", " / ").split()
            while parts and singular(parts[0].lower()) in MULTIPLIERS:
                factor *= MULTIPLIERS[singular(parts.pop(0).lower())]
            per = " / ".join(token[1:] for token in core[end:] if token[0] == '"') if "/" in core[end:] else " ".join(parts)
            name, power = _unit_of(per)
            core, trailing = core[:end], (name, exponents[0] if len(exponents) == 1 else power)
        else:
            break
        units = [*units[:beside], trailing, *units[beside:]] if trailing[0] else units
    if not core or core[-1] in (r"\frac", r"\sqrt"):
        return Measured(tuple(tokens))
    names = list(dict.fromkeys(name for name, _ in units))
    return Measured(tuple(core), " ".join(names), units[-1][1] if units else 1, factor)


def _phrase_start(core: list[str]) -> int:
    """Start of the phrase at the end of `core`: words, their exponents, and `/` or `\\cdot` between words."""
    end = len(core)
    while end:
        exponent = re.search(r" \^ (?:\d+|\{ \d+ \})$", " " + " ".join(core[max(0, end - 4):end]))
        start = end - (len(exponent.group().split()) if exponent else 1)
        if start > 0 and (exponent or (end < len(core) and core[start] in ("/", r"\cdot"))) and core[start - 1][0] == '"':
            end = start
        elif core[end - 1][0] == '"' and core[end - 1][1:].lower() not in SEPARATORS:
            end -= 1
        else:
            break
    return end
