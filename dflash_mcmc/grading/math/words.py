"""Words that occur in answers: units, names of functions, numbers, and separators of two answers."""

from __future__ import annotations

import re

FUNCTIONS = ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln",
             "exp")
NAMED = {**{name: f"\\{name}" for name in FUNCTIONS}, "sqrt": r"\sqrt", "pi": r"\pi", "infinity": r"\infty",
         "infty": r"\infty", "inf": r"\infty", "oo": r"\infty", "frac": r"\frac", "theta": r"\theta", "alpha": r"\alpha",
         "beta": r"\beta", "gamma": r"\gamma", "omega": r"\omega", "lambda": r"\lambda", "phi": r"\phi"}
"""Words that models write instead of a LaTeX command."""

SEPARATORS = ("and", "or")
NUMBERS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16, "seventeen": 17, "eighteen": 18,
    "nineteen": 19, "twenty": 20,
}
_LARGE = ("hundred", "thousand", "lakh", "lac", "crore", "gross", "score", "dozen", "myriad", "googol")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_ILLIONS = re.compile(r"\w*illi(?:on|ard)s?")
_ORDINAL = re.compile(r"\w+ths?")
MULTIPLIERS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}

_UNITS = {
    "mm": "millimeter millimetre mm", "cm": "centimeter centimetre cm", "m": "meter metre m", "km": "kilometer kilometre km",
    "in": "inch in", "ft": "foot feet ft", "yd": "yard yd", "mi": "mile mi", "g": "gram gramme gm g", "kg": "kilogram kg",
    "mg": "milligram mg", "lb": "pound lb", "oz": "ounce oz", "s": "second sec s", "min": "minute min", "h": "hour hr h",
    "day": "day", "week": "week wk", "month": "month mo", "year": "year yr", "l": "liter litre l",
    "ml": "milliliter millilitre ml",
    "gal": "gallon gal", "mph": "mph", "kmh": "kmh kph", "dollar": "dollar usd buck", "cent": "cent", "euro": "euro eur",
    "degree": "degree deg", "percent": "percent pct percentage", "radian": "radian rad", "hz": "hertz hz", "j": "joule",
    "acre": "acre", "quart": "quart qt", "pint": "pint pt", "cup": "cup",
}
_PLURALS = {"inches": "inch", "feet": "foot", "centuries": "century", "pennies": "cent", "penny": "cent"}
_UNIT_OF = {alias: unit for unit, aliases in _UNITS.items() for alias in aliases.split()}
_PHRASES = {
    ("mile", "per", "hour"): "mph", ("mi", "per", "h"): "mph", ("kilometer", "per", "hour"): "kmh", ("km", "per", "h"): "kmh",
    ("degree", "fahrenheit"): "degree f", ("degree", "celsius"): "degree c", ("degree", "f"): "degree f",
    ("degree", "c"): "degree c", ("a.m",): "am", ("p.m",): "pm",
}
WITHOUT_MEANING = ("unit", "th", "st", "nd", "rd", "total", "approximately", "about", "exactly", "only")
"""Words that add nothing to the number beside them."""

MEANINGFUL = frozenset((
    "or", "and", "not", "no", "none", "more", "less", "than", "least", "most", "above", "below", "over", "under", "if", "when",
    "while", "where", "to", "minus", "plus", "negative", "positive", "mod", "modulo", "base", "remainder", "divided",
    "squared", "cubed", "except", "without", "true", "false", "is", "are", "was", "wrong", "incorrect", "never", "factorial",
    "choose", "times", "halves", "half", "third", "quarter", "mille", "permille", "permil", "repeating", "recurring", "binary",
    "octal", "hexadecimal", "hex", "tens", "bn", "mn", "mil", "rejected", "extraneous", "invalid", "excluded", "undefined",
    "inverse", "doubled", "tripled", "halved", "fewer", "fails",
))
"""Words that change the meaning of a number beside them, so that they are not part of a unit. Numbers and fractions in words
are found by `is_number_word`."""
_SYMBOLS = frozenset((
    *"mgshlLJNWVCF", "am", "pm", "AM", "PM", "st", "nd", "rd", "th", "cc", "dB", "Pa", "eV", "kW", "MW", "mW", "kV", "mV",
    "mA", "kJ", "MJ", "kN", "GB", "MB", "kB", "KB", "TB", "ha", "cl", "dl", "dm", "nm", "BC", "AD", "CE",
))
"""Words of one or two letters that are units. Other short words may be variables, or mean thousand."""
_NOUNS = frozenset((
    "month", "tooth", "teeth", "length", "width", "depth", "breadth", "path", "bath", "booth", "cloth", "moth", "birth",
    "death", "youth", "earth", "north", "south", "math", "health", "wealth", "growth", "truth", "strength", "myth", "mouth",
    "breath", "with", "both", "worth",
))
"""Words in -th that are not fractions."""
SHORT_WORDS = frozenset(("yes", "no", "odd", "all"))
"""Short words that are answers, not products of variables."""
LINKS = ("of", "per", "sq", "cu", "for")
"""Short words between or before units, which are not variables."""
BARE = frozenset(word for word in _UNIT_OF if len(word) > 1)
"""Units that are recognised after a number without `\\text`. A single letter is a variable instead."""


def is_number_word(word: str) -> bool:
    """Whether a word is a number or part of one: `thirteen`, `lakhs`, `quadrillion` or `elevenths`."""
    word = word.lower()
    number_words = (*NUMBERS, *_TENS, *_LARGE, *MULTIPLIERS)
    if word in number_words or singular(word) in number_words or _ILLIONS.fullmatch(word):
        return True
    return _ORDINAL.fullmatch(word) is not None and singular(word) not in _NOUNS


def unit_of(words: str) -> tuple[str, int]:
    """(unit, exponent) of a phrase such as `square inches`. All spellings give one name; words like `total` give ""."""
    parts = [part.strip(".") for part in words.lower().replace("-", " ").replace("/", " per ").split()]
    parts = [part for part in parts if part and part not in ("of", "the", "a", "an")]
    exponent = 1
    if len(parts) > 1 and parts[0] in ("square", "sq", "cubic", "cu"):
        exponent = 2 if parts[0] in ("square", "sq") else 3
        parts = parts[1:]
    parts = [singular(part) for part in parts]
    parts = [part for part in parts if part not in WITHOUT_MEANING]
    phrase = _PHRASES.get(tuple(parts)) or _PHRASES.get(tuple(_UNIT_OF.get(part, part) for part in parts))
    return phrase or " ".join(_UNIT_OF.get(part, part) for part in parts), exponent


def is_symbol(word: str) -> bool:
    """Whether a word of one or two letters is a known unit."""
    return word in _SYMBOLS or (len(word) > 1 and singular(word.lower()) in _UNIT_OF)


def singular(word: str) -> str:
    """The singular of a word: `meter` for `meters`."""
    if word in _PLURALS:
        return _PLURALS[word]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
