r"""Formulas: math-verify's parser reads them, their values refuse, and math-verify accepts.

math-verify drops indices and primes, ignores the case of letters, and accepts numbers that differ by less than 1e-15.
Therefore it gets explicit LaTeX, with one plain letter for each symbol, and numbers are compared exactly or in 150 digits.
These functions run in grading processes only, because they can take long.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dflash_mcmc.grading.math.latex import FUNCTIONS, is_number
from dflash_mcmc.grading.verdicts import MAX_BITS, MAX_EXPONENT, MAX_FACTORIAL, Unsupported

_DIGITS, _AGREEING, _ZERO = 400, 150, 300
"""Digits of values, leading digits in which equal values agree, and decimal places of a value that counts as 0."""
_LETTERS = "xyzabcklmnpqrstuvwgh"
"""Letters that the parser reads as variables in every context."""
_NAMES = "|".join(FUNCTIONS)
CALLS = frozenset(f"\\{name}" for name in FUNCTIONS)
_GREEK = (r"\\(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|upsilon|phi|chi|psi"
          r"|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega|ell|hbar|degree)")
_KNOWN = re.compile(
    rf"[\d.]\S*|[a-zA-Z]|{_GREEK}|\\(?:{_NAMES}|frac|binom|sqrt|pi|infty|cdot|[lr](?:floor|ceil)|\\)"
    r"|\\(?:begin|end)\{(?:[pbB]?matrix|smallmatrix|array)\}|[-+/()\[\]{}|!^_'&]")
_LIMITED = frozenset(f"\\{name}" for name in ("sum", "prod", "coprod", "int", "iint", "oint", "lim", "limsup", "liminf"))
# Parts of a formula whose tokens are separated by spaces.
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_ROUND = r"\((?:[^()]|\([^()]*\))*\)"
_COMMAND = rf"\\(?:frac|binom) {_GROUP} {_GROUP}|\\sqrt(?: \[[^]]*\])? {_GROUP}"
_UNBRACED = re.compile(  # of a number, a command takes the first digit, and a power the whole number with its sign
    rf"(\\(?:frac|binom)(?: {_GROUP})?|\\sqrt(?: \[[^]]*\])?|[\^_](?= \\| \()) ({_COMMAND}|{_ROUND}"
    rf"|\d(?!\d*\.)|(?!\\(?:frac|binom|sqrt) )[^][{{}}\d. ]\S*)|([\^_]) ((?:- )?[^-{{(\\ ]\S*)")
_CALL = re.compile(
    rf"(\\(?:{_NAMES})(?: [\^_] {_GROUP})*+) ({_GROUP}|\[[^]]*\]|(?:- )?(?:(?:{_COMMAND}|[\^_] {_GROUP}|\| [^|]* \|"
    rf"|(?!\\(?:{_NAMES}|cdot|frac|sqrt|binom) )[^][(){{}}|/+^_ -]\S*)(?= ) ?)+)")
_SYMBOL = re.compile(  # with its index, its primes, and the argument of a function; `e` and `i` are numbers
    rf"(?<!\S)(?:[fghFGHP](?: _ {_GROUP})?(?: ')* {_ROUND}"
    rf"|(?:(?![ei] (?!['_]))[a-zA-Z]|{_GREEK}(?![a-zA-Z]))(?: _ {_GROUP})?(?: ')*(?: \( [\d.]\S* \))?)(?= )")
_BESIDE = re.compile(r"(?:(?<!\S)\w+|\\pi)(?= [(\[]| \\begin)|\d(?= \\frac)|\)(?= \d)")
"""Where the parser would read a function of a number, or a sum."""


class NotParsed(Exception):
    """The tokens are no formula: words, an unknown command, or a misplaced sign. Such answers are compared token by token."""


@lru_cache(maxsize=1024)
def formula(tokens: tuple[str, ...]) -> Any:
    """The formula of tokens, unevaluated. Raises NotParsed, and Unsupported beyond the limits."""
    from latex2sympy2_extended.latex2sympy2 import latex2sympy
    from sympy import Expr, MatMul, MatrixBase, MatrixExpr, Symbol, pi, preorder_traversal

    names: dict[str, str] = {}
    words = [token.lstrip('"') if len(token) == 2 else token for token in tokens]
    for token in words:
        if token in _LIMITED or (token == r"\binom" and any(is_number(each) and len(each) > 3 for each in tokens)):
            raise Unsupported(token[1:])
        if not _KNOWN.fullmatch(token):
            raise NotParsed(token)
    text, before = " ".join([*words, ""]), ""
    while text != before:
        text, before = _UNBRACED.sub(lambda found: f"{found[1] or found[3]} {{ {found[2] or found[4]} }} ", text), text
        text = re.sub(" +", " ", text)
    if limit := re.search(rf"\^ {_GROUP} (\^)|(?<!\w) !", text):
        raise Unsupported("power of a power" if limit[1] else "factorial")
    text = _SYMBOL.sub(lambda found: names.setdefault(found.group(), _LETTERS[len(names) % len(_LETTERS)]), text)
    if len(names) > len(_LETTERS):
        raise Unsupported("number of symbols")
    if re.search(r"(?<!\S)(?:\d\S*|[a-df-hj-z]) (?=[\d.])", text):
        raise NotParsed("a number after a number or symbol")
    text = _CALL.sub(lambda found: f"{found[1]} ( {found[2]} )", text)
    text = re.sub(r"(?<!\S)i(?!\S)", "(I)", text)
    text = re.sub(r"(?<!\S)[\d.]\S*", _fraction, text)
    text = _BESIDE.sub(r"\g<0> \\cdot", re.sub(r"\{(?:[pbB]?matrix|smallmatrix|array)\}", "{pmatrix}", text))
    try:
        parsed = latex2sympy(text, normalization_config=None)
    except (RecursionError, MemoryError):
        raise
    except Exception as error:  # the library has no class for its errors
        raise NotParsed(text) from error
    if isinstance(parsed, MatMul) and [isinstance(part, MatrixBase) for part in preorder_traversal(parsed)].count(True) == 1:
        factor, (matrix,) = parsed.as_coeff_matrices()
        parsed = matrix.applyfunc(lambda entry: factor * entry) if isinstance(matrix, MatrixBase) else parsed
    parts = [] if isinstance(parsed, MatrixBase) else preorder_traversal(parsed)
    if not isinstance(parsed, (MatrixBase, Expr)) or any(isinstance(part, (MatrixBase, MatrixExpr)) for part in parts):
        raise NotParsed(text)
    symbols = {Symbol(letter): pi / 180 if name == r"\degree" else Symbol(name) for name, letter in names.items()}
    if isinstance(parsed, MatrixBase):
        return parsed.as_immutable().applyfunc(lambda entry: _checked(entry.xreplace(symbols)))
    return _checked(parsed.xreplace(symbols))


def _fraction(found: re.Match) -> str:
    """A number's token as its exact value. Raises Unsupported for an exponent beyond the limit."""
    mantissa, _, exponent = found.group().partition("e")
    if abs(int(exponent or 0)) > MAX_EXPONENT:
        raise Unsupported("exponent")
    fixed, _, period = mantissa.rstrip(")").partition("(")
    value = Fraction(f"{fixed}0" if period else fixed) * Fraction(10) ** int(exponent or 0)
    if period:
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed.partition(".")[2]))
    return str(value) if value.denominator == 1 else rf"(\frac{{{value.numerator}}}{{{value.denominator}}})"


def _checked(parsed: Any) -> Any:
    """The formula with real odd roots of negative numbers, as answers mean them, and not the principal ones.

    Raises Unsupported for powers, factorials and binomials beyond the limits. Their values are estimated, never computed.
    """
    from sympy import Integer, log, nan, preorder_traversal, zoo

    for node in preorder_traversal(parsed):
        name, parts = type(node).__name__, [part.evalf(9) for part in node.args]
        if name in ("Pow", "exp"):
            base, exponent = parts if name == "Pow" else (Integer(3), parts[0])
            if exponent.is_number and abs(exponent) > MAX_EXPONENT:
                raise Unsupported("exponent")
            numbers = base.is_number and exponent.is_number and base
            if numbers and abs(exponent * log(abs(base), 2).evalf(9)) > MAX_BITS:
                raise Unsupported("number of digits")
        elif node in (zoo, nan):
            raise NotParsed(name)
        elif name in ("factorial", "binomial") and any(part.is_number and abs(part) > MAX_FACTORIAL for part in parts):
            raise Unsupported(name)
    return parsed.replace(lambda node: node.is_Pow and node.exp.is_Rational and node.exp.p == 1 and node.exp.q % 2 == 1
                          and bool(node.base.is_negative), lambda root: -((-root.base) ** root.exp))


def values(*nodes: Any) -> Iterator[list[Any]]:
    """The values of formulas, in 400 digits, at each of a few irrational points at which all are finite.

    Two of the points are negative. Some are near 0, where a high power hides no other term.
    """
    import mpmath
    from sympy import lambdify

    names = sorted(set().union(*(node.free_symbols for node in nodes)), key=str)
    functions = [lambdify(names, node, "mpmath") for node in nodes]
    with mpmath.workdps(_DIGITS):
        for step, scale in enumerate((1, -9, 97, -1009) if names else (1,)):
            squares = [mpmath.mpf(3 + 2 * index * (1 + step)) / (7 + abs(scale)) for index in range(len(names))]
            signs = [-1 if step == 3 and index % 2 else 1 for index in range(len(names))]
            point = [sign * mpmath.sqrt(square) / scale for sign, square in zip(signs, squares, strict=True)]
            try:
                found = [mpmath.mpmathify(function(*point)) for function in functions]
            except (ArithmeticError, ValueError, TypeError):
                continue
            if all(map(mpmath.isfinite, found)):
                yield found


def agree(a: Any, b: Any) -> bool:
    """Whether two values agree in 150 digits."""
    import mpmath

    with mpmath.workdps(_DIGITS):
        if a == 0 or b == 0:
            return max(abs(a), abs(b)) < mpmath.mpf(10) ** -_ZERO
        return abs(a - b) <= mpmath.mpf(10) ** -_AGREEING * max(abs(a), abs(b))


def same(gold: Any, answer: Any) -> bool:
    """Whether two formulas are equal.

    Numbers are, if their values agree. Formulas with symbols are not, if they differ at a point at which one of them is real;
    otherwise math-verify decides, for positive symbols. Raises Unsupported.
    """
    from math_verify import verify
    from sympy import I, Symbol, oo

    if gold == answer:
        return True
    if gold.is_Matrix or answer.is_Matrix:
        return gold.is_Matrix and answer.is_Matrix and gold.shape == answer.shape and all(map(same, gold, answer))
    if gold.has(oo) or answer.has(oo):
        return False
    if not gold.free_symbols | answer.free_symbols:
        done = gold.doit(), answer.doit()
        rational = done[0].is_Rational and done[1].is_Rational
        return done[0] == done[1] if rational else any(agree(*pair) for pair in values(gold, answer))
    complex_ = gold.has(I) or answer.has(I)
    if any(not agree(*pair) for pair in values(gold, answer) if complex_ or not all(x.imag for x in pair)):
        return False
    # No time limit here: math-verify would return "not equal" for a slow answer. The pool limits the time.
    positive = {symbol: Symbol(str(symbol), positive=True) for symbol in gold.free_symbols | answer.free_symbols}
    sides = [side.xreplace(positive) + 1 for side in (gold, answer)]  # plus 1: it compares single symbols by their names
    return bool(verify(*sides, float_rounding=15, numeric_precision=30, strict=True, timeout_seconds=None))


def ratio(a: Any, b: Any) -> Any:
    """The real factor r with a = r * b at all points, as an equation may be multiplied by it; None if there is none."""
    ratios = [x / y if y else 0 for x, y in values(a, b)]
    constant = len(ratios) > 1 and ratios[0] and not ratios[0].imag and all(agree(ratios[0], other) for other in ratios)
    return ratios[0] if constant else None
