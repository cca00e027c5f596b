"""Values of formulas, and whether two formulas are equal, by their values and by math-verify.

Values are exact if they are rational, otherwise they have 400 digits, at points that are the same for every answer.

math-verify has parsing rules that lose information: it drops indices and primes, ignores the case of letters and reads `x^T`
as x. To avoid these rules, math-verify gets LaTeX that is written from our own parse tree, with one plain letter for each
symbol. Two checks come first, without math-verify. Formulas whose values differ at some point are not equal. Numbers are
compared by their values only, because math-verify accepts any two numbers that differ by less than 1e-15.

These functions run in grading processes only, because they can take long.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dflash_mcmc.grading.math.syntax import Node
from dflash_mcmc.grading.verdicts import MAX_BITS, MAX_EXPONENT, MAX_FACTORIAL, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from mpmath import mpc

DIGITS = 400
_AGREEING_DIGITS = 150
"""The number of leading digits in which equal values must agree. The remaining digits absorb rounding and cancellation."""
_ZERO_DIGITS = 300
"""A value below 10^-300 counts as rounding error if it is compared with 0."""
_SCALES = (1, 9, 97, 1009)
_ROOT_BITS = 4096


class NoValue(Exception):
    """A formula has no value at a point, e.g. because of a division by zero or infinity."""


def exact(node: Node, points: Mapping[str, Fraction] | None = None) -> Fraction | None:
    """The exact value with the symbols at `points`; None if it is not rational or needs a function such as sin.

    Raises Unsupported for numbers beyond the limits and NoValue for a division by zero.
    """
    if node.kind == "number":
        return node.number
    if node.kind == "symbol":
        return (points or {}).get(node.name)
    values = [exact(part, points) for part in node.parts]
    rational = [value for value in values if value is not None]
    if len(rational) < len(values) or not values:
        return None
    if node.kind == "root":
        return _root(rational[0], node.number)
    return _RATIONAL[node.kind](*rational) if node.kind in _RATIONAL else None


def symbols(node: Node) -> set[str]:
    """The names of the symbols in a formula."""
    own = {node.name} if node.kind == "symbol" else set()
    return own.union(*(symbols(part) for part in node.parts))


def has(node: Node, kind: str, value: str | None = None) -> bool:
    """Whether a formula contains a node of this kind and, if given, this value."""
    return (node.kind == kind and value in (None, node.value)) or any(has(part, kind, value) for part in node.parts)


def differ(a: Node, b: Node) -> bool:
    """Whether two formulas have different values at one of a few fixed points.

    False proves nothing, because the formulas may have no values at these points. The symbols are positive there, so that
    their roots and logarithms are real. Raises Unsupported for numbers beyond the limits.
    """
    import mpmath

    with mpmath.workdps(DIGITS):
        for point in _points(symbols(a) | symbols(b)):
            try:
                values = [_numeric(node, point) for node in (a, b)]
            except (NoValue, ArithmeticError, ValueError, TypeError):
                continue
            if not all(mpmath.isfinite(value) for value in values):
                continue
            if not _agree(*values):
                return True
    return False


def same_constant(a: Node, b: Node) -> bool:
    """Whether two formulas without symbols have values that agree in 150 digits, and so are forms of one number."""
    values = _constants(a, b)
    return values is not None and _agree(*values)


def close(a: Node, b: Node, tolerance: float) -> bool:
    """Whether two formulas have no symbols and their values differ by at most `tolerance` times the larger one."""
    values = None if symbols(a) | symbols(b) else _constants(a, b)
    return values is not None and abs(values[0] - values[1]) <= tolerance * max(map(abs, values))


def within(a: Node, b: Node, distance: Fraction) -> bool:
    """Whether two formulas have no symbols and their values differ by at most `distance`."""
    values = None if symbols(a) | symbols(b) else _constants(a, b)
    return values is not None and abs(values[0] - values[1]) * distance.denominator <= distance.numerator


def _constants(a: Node, b: Node) -> list[mpc] | None:
    """The values of two formulas without symbols; None if one of them has no finite value."""
    import mpmath

    with mpmath.workdps(DIGITS):
        try:
            values = [_numeric(node, {}) for node in (a, b)]
        except (NoValue, ArithmeticError, ValueError, TypeError):
            return None
        return values if all(mpmath.isfinite(value) for value in values) else None


def _agree(a: mpc, b: mpc) -> bool:
    from mpmath import mpf, workdps

    with workdps(DIGITS):
        if a == 0 or b == 0:
            return max(abs(a), abs(b)) < mpf(10) ** -_ZERO_DIGITS
        return abs(a - b) <= mpf(10) ** -_AGREEING_DIGITS * max(abs(a), abs(b))


def ratio(a: Node, b: Node) -> Fraction | None:
    """The rational factor r with a = r * b at all of a few fixed points; None if there is none.

    Where a formula has no rational value there, as one with pi or a root, it is that of one point, found in `DIGITS` digits.
    """
    names = sorted(symbols(a) | symbols(b))
    ratios = set()
    for shift in _SCALES:
        point = {name: Fraction(7 * index + 3 * shift + 11, 5 + 2 * index + shift) for index, name in enumerate(names)}
        try:
            over, under = exact(a, point), exact(b, point)
        except NoValue:
            return None
        if over is None or under is None:
            return _numeric_ratio(a, b)
        if not over or not under:
            return None
        ratios.add(over / under)
    return ratios.pop() if len(ratios) == 1 else None


def _numeric_ratio(a: Node, b: Node) -> Fraction | None:
    """The simple fraction that a / b is at the first point at which both have real values; None if it is no such fraction."""
    import mpmath

    with mpmath.workdps(DIGITS):
        for point in _points(symbols(a) | symbols(b)):
            try:
                found = _numeric(a, point) / _numeric(b, point)
                factor = Fraction(str(mpmath.re(found))).limit_denominator(_MOST_DENOMINATOR)
            except (NoValue, ArithmeticError, ValueError, TypeError):
                continue
            return factor if factor and _agree(found, mpmath.mpf(factor.numerator) / factor.denominator) else None
    return None


_MOST_DENOMINATOR = 10_000
"""The largest denominator of a factor between two equations."""


def _points(names: set[str]) -> Iterator[dict[str, mpc]]:
    """Irrational points at several scales. Some are near 0, because far from 0 a high power can hide the other terms."""
    from mpmath import mpf, sqrt

    for scale in _SCALES if names else (1,):
        yield {name: sqrt(mpf(3 + 2 * index) / (7 + scale)) / scale for index, name in enumerate(sorted(names))}


def _numeric(node: Node, point: Mapping[str, mpc]) -> mpc:
    import mpmath

    if node.kind == "number":
        return mpmath.mpf(node.number.numerator) / node.number.denominator
    if node.kind == "symbol":
        return point[node.name]
    if node.kind == "constant":
        if node.value == "oo":
            raise NoValue("infinity")
        return {"pi": mpmath.pi, "e": mpmath.e, "i": mpmath.mpc(0, 1)}[node.name] * 1  # a constant of mpmath has no digits yet
    value = exact(node) if node.kind in ("power", "root", "factorial", "binomial") else None
    if value is not None:
        return mpmath.mpf(value.numerator) / value.denominator
    values = [_numeric(part, point) for part in node.parts]
    if node.kind == "call":
        return _FUNCTIONS[node.name](mpmath)(*values)
    if node.kind == "root":
        negative = node.number % 2 == 1 and mpmath.im(values[0]) == 0 and mpmath.re(values[0]) < 0
        root = mpmath.root(-values[0] if negative else values[0], int(node.number))
        return -root if negative else root
    if node.kind in _NUMERIC:
        return _NUMERIC[node.kind](mpmath)(*values)
    return _RATIONAL[node.kind](*values)


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        root = _root(base, exponent.denominator) if base >= 0 else None
        return None if root is None else _power(root, Fraction(exponent.numerator))
    if abs(exponent) > MAX_EXPONENT:
        raise Unsupported("exponent")
    if abs(exponent) * _bits(base) > MAX_BITS:
        raise Unsupported("number of digits")
    if base == 0 and exponent < 0:
        raise NoValue("division by zero")
    return base ** int(exponent)


def _root(radicand: Fraction, index: int | Fraction) -> Fraction | None:
    """The real root if it is rational, otherwise None."""
    from sympy import integer_nthroot

    if (radicand < 0 and index % 2 == 0) or _bits(radicand) > _ROOT_BITS:
        return None
    (over, whole_over), (under, whole_under) = (integer_nthroot(abs(part), int(index))
                                                for part in (radicand.numerator, radicand.denominator))
    if not whole_over or not whole_under:
        return None
    return Fraction(int(over) if radicand >= 0 else -int(over), int(under))


def _bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _divide(over, under):
    if under == 0:
        raise NoValue("division by zero")
    return over / under


def _multiply(a, b):
    if isinstance(a, Fraction) and _bits(a) + _bits(b) > MAX_BITS:
        raise Unsupported("number of digits")
    return a * b


def _factorial(number: Fraction) -> Fraction | None:
    if number.denominator != 1 or number < 0:
        return None
    if number > MAX_FACTORIAL:
        raise Unsupported("factorial")
    return Fraction(math.factorial(int(number)))


def _binomial(n: Fraction, k: Fraction) -> Fraction | None:
    if n.denominator != 1 or k.denominator != 1 or n < 0 or k < 0:
        return None
    if max(n, k) > MAX_FACTORIAL:
        raise Unsupported("binomial")
    return Fraction(math.comb(int(n), int(k)))


_RATIONAL: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "negate": lambda a: -a, "multiply": _multiply, "divide": _divide, "power": _power,
    "floor": lambda a: Fraction(math.floor(a)), "ceil": lambda a: Fraction(math.ceil(a)), "absolute": abs,
    "factorial": _factorial, "binomial": _binomial,
}
"""Operations on rational numbers. The arithmetic operations are also applied to numbers of mpmath, which has no types."""


def _limited_power(mpmath):
    def power(base, exponent):
        if abs(exponent) > MAX_EXPONENT:
            raise Unsupported("exponent")
        return mpmath.power(base, exponent)
    return power


def _no_value(mpmath):
    raise NoValue("a factorial of a formula")


_NUMERIC = {
    "power": _limited_power, "factorial": _no_value, "binomial": _no_value, "absolute": lambda mpmath: abs,
    "degrees": lambda mpmath: mpmath.radians, "floor": lambda mpmath: mpmath.floor, "ceil": lambda mpmath: mpmath.ceil,
}
_FUNCTIONS = {
    "sin": lambda m: m.sin, "cos": lambda m: m.cos, "tan": lambda m: m.tan, "cot": lambda m: m.cot, "sec": lambda m: m.sec,
    "csc": lambda m: m.csc, "arcsin": lambda m: m.asin, "arccos": lambda m: m.acos, "arctan": lambda m: m.atan,
    "sinh": lambda m: m.sinh, "cosh": lambda m: m.cosh, "tanh": lambda m: m.tanh, "ln": lambda m: m.log,
    "log": lambda m: lambda x, base: m.log(x) / m.log(base),
}


_LETTERS = "xyzabcklmnpqrstuvwgh"
"""Letters that math-verify reads as variables in every context."""


def equal(gold: Node, answer: Node) -> bool:
    """Whether two formulas are equal. Raises Unsupported for a number beyond the limits and for too many symbols."""
    if gold == answer:
        return True
    if has(gold, "constant", "oo") or has(answer, "constant", "oo"):
        return False
    gold_value, answer_value = exact(gold), exact(answer)
    if gold_value is not None and answer_value is not None:
        return gold_value == answer_value
    if not symbols(gold) | symbols(answer):
        return same_constant(gold, answer)
    if differ(gold, answer):
        return False
    return verified(gold, answer)


def verified(gold: Node, answer: Node) -> bool:
    """Whether math-verify finds two formulas equal. Its settings are those with the fewest false accepts on labelled pairs."""
    from math_verify import verify

    if "symbol" in (gold.kind, answer.kind):  # math-verify compares the names if a side is one
        gold, answer = (Node("add", (node, Node("number", value=Fraction(1)))) for node in (gold, answer))
    names = sorted(symbols(gold) | symbols(answer))
    if len(names) > len(_LETTERS):
        raise Unsupported("number of symbols")
    letters = dict(zip(names, _LETTERS, strict=False))
    parsed = [parsed_latex(to_latex(node, letters)) for node in (gold, answer)]
    # No time limit here: math-verify would return "not equal" for a slow answer. The pool limits the time.
    return bool(verify(*parsed, float_rounding=15, numeric_precision=30, strict=True, allow_set_relation_comp=False,
                       timeout_seconds=None))


def parsed_latex(latex: str) -> list:
    """math-verify's parse of LaTeX from `to_latex`, without its normalisation. Empty if it cannot parse the LaTeX."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    no_normalisation = NormalizationConfig(basic_latex=False, units=False, malformed_operators=False, nits=False, boxed="none",
                                       equations=False)
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=no_normalisation)]
    return parse(f"${latex}$", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)


def to_latex(node: Node, letters: dict[str, str]) -> str:
    """Unambiguous LaTeX of a formula: explicit products, arguments in parentheses, numbers as fractions of integers.

    `letters` maps the name of each symbol to the letter to write.
    """
    if node.kind == "number":
        value = node.number
        return str(value.numerator) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    if node.kind == "symbol":
        return letters[node.name]
    if node.kind == "constant":
        return {"pi": r"\pi", "e": "e", "i": "I", "oo": r"\infty"}[node.name]
    parts = [to_latex(part, letters) for part in node.parts]
    if node.kind == "call":
        return _call(node.name, parts)
    if node.kind == "root":
        return rf"({parts[0]})^{{\frac{{1}}{{{node.value}}}}}"
    if node.kind in _CHAINS and node.parts[0].kind == node.kind:  # without parentheses: a long sum does not nest deeply
        return f"{parts[0]}{_CHAINS[node.kind]}({parts[1]})"
    return _FORMS[node.kind].format(*parts)


def _call(name: str, parts: list[str]) -> str:
    if name == "log":
        return rf"\frac{{\ln({parts[0]})}}{{\ln({parts[1]})}}"
    return rf"\{name}({parts[0]})"


_CHAINS = {"add": "+", "multiply": r"\cdot"}
_FORMS = {
    "add": "({0})+({1})", "negate": "-({0})", "multiply": r"({0})\cdot({1})", "divide": r"\frac{{{0}}}{{{1}}}",
    "power": "({0})^{{{1}}}", "absolute": "|{0}|", "factorial": "({0})!", "binomial": r"\binom{{{0}}}{{{1}}}",
    "floor": r"\lfloor {0} \rfloor", "ceil": r"\lceil {0} \rceil", "degrees": r"\frac{{({0})\cdot\pi}}{{180}}",
}
