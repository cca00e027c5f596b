r"""Formulas: math-verify's parser reads them, their values refuse, and math-verify accepts.

math-verify drops indices and primes, ignores the case of letters, and accepts numbers that differ by less than 1e-15.
Therefore it gets explicit LaTeX, with one plain letter for each symbol, and numbers are compared exactly or in 150 digits.
These functions run in grading processes only, because they can take long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dflash_mcmc.grading.math.latex import FUNCTIONS, is_number
from dflash_mcmc.grading.verdicts import MAX_BITS, MAX_EXPONENT, MAX_FACTORIAL, Unsupported

_DIGITS, _AGREEING, _ZERO = 400, 150, 300
"""Digits of values, leading digits in which equal values agree, and decimal places of a value that counts as 0."""
_LETTERS = "xyzabcklmnpqrstuvwgh"
"""Letters that the parser reads as variables in every context."""
_GREEK = frozenset(re.findall(r"\\\w+", r"\alpha\beta\gamma\delta\epsilon\zeta\eta\theta\iota\kappa\lambda\mu\nu\xi\rho\sigma"
                              r"\tau\upsilon\phi\chi\psi\omega\Gamma\Delta\Theta\Lambda\Xi\Pi\Sigma\Phi\Psi\Omega\ell\hbar"))
_APPLIED = frozenset("fghFGHP")
"""Letters that are read as functions if parentheses follow."""
CALLS = frozenset(f"\\{name}" for name in FUNCTIONS)
_KNOWN = CALLS | {r"\pi", r"\infty", r"\lfloor", r"\rfloor", r"\lceil", r"\rceil", r"\cdot", *"+-/()[]{}|!"}
_ARGUMENTS = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1, "^": 1, "_": 1}
_ENDING = frozenset((r"\cdot", "/", "(", "[", ")", "]", "}", *CALLS))
"""What ends the argument of a function that has no brackets."""
_LIMITED = frozenset(f"\\{name}" for name in ("sum", "prod", "coprod", "int", "iint", "oint", "lim", "limsup", "liminf"))


class NotParsed(Exception):
    """The tokens are no formula: words, an unknown command, or a misplaced sign. Such answers are compared token by token."""


@lru_cache(maxsize=1024)
def formula(tokens: tuple[str, ...]) -> Any:
    """The formula of tokens, unevaluated. Raises NotParsed, and Unsupported beyond the limits."""
    from latex2sympy2_extended.latex2sympy2 import latex2sympy
    from sympy import Expr, MatMul, MatrixBase, MatrixExpr, Rational, Symbol, preorder_traversal

    plain = re.fullmatch(r"(- )?(?:(\d*\.?\d+|\d+\.)|\\frac \{ (\d+) \} \{ (\d*[1-9]\d*) \})", " ".join(tokens))
    if plain:  # the parser takes its time
        value = Fraction(plain[2] or f"{plain[3]}/{plain[4]}")
        return Rational(-value.numerator if plain[1] else value.numerator, value.denominator)
    names: dict[str, str] = {}
    text = _explicit(tokens, names)
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
    symbols = {Symbol(letter): Symbol(name) for name, letter in names.items()}
    if isinstance(parsed, MatrixBase):
        return parsed.as_immutable().applyfunc(lambda entry: _checked(entry.xreplace(symbols)))
    return _checked(parsed.xreplace(symbols))


def _explicit(tokens: Sequence[str], names: dict[str, str]) -> str:
    """LaTeX for the parser: arguments in braces, decimals as fractions, and one letter of `names` for each symbol."""
    left, written, before, called = list(tokens), "", "", ""
    while left:
        token = left.pop(0)
        letter = token.lstrip('"')
        constant = token in ("e", "i") and left[:1] not in (["_"], ["'"])
        symbol = token in _GREEK or (letter.isalpha() and len(letter) == 1 and not constant)
        kind = "number" if is_number(token) else "symbol" if symbol else token
        if token in _LIMITED or token == "^" == before or (token == "!" and before not in ("number", "symbol")):
            raise Unsupported({"^": "power of a power", "!": "factorial"}.get(token, token[1:]))
        if called and (token in _ENDING or (token in "+-" and before not in CALLS)):  # `\sin x (y + 1)`
            written, called = written + ")", ""
        if before in CALLS and token not in ("(", "{", "[", "^", "_") and not called:
            written, called = written + "(", token
        if kind == "number":
            if before in ("number", "symbol"):
                raise NotParsed(token)
            value = number(token)
            text = str(value) if value.denominator == 1 else rf"(\frac{{{value.numerator}}}{{{value.denominator}}})"
        elif constant:
            text = {"e": "e", "i": "(I)"}[token]
        elif kind == "symbol":
            text = _letter(letter, left, names)
        elif matrix := re.fullmatch(r"\\(begin|end)\{(?:[pbB]?matrix|smallmatrix|array)\}", token):
            text = rf"\{matrix[1]}{{pmatrix}}"
        elif token in ("&", r"\\") and r"\end{" in "".join(left):
            text = token
        elif token == r"\degree":
            text = r"\cdot\frac{\pi}{180}"
        elif token == r"\exp":
            text = "e^" + _argument(left, names)
        elif token in _ARGUMENTS and not (token == "_" and before != r"\log"):
            if token == r"\binom" and any(is_number(part) and len(part) > 3 for part in left):
                raise Unsupported("binomial")
            index = f"[{''.join(_group(left))}]" if token == r"\sqrt" and left[:1] == ["["] else ""
            text = token + index + "".join(_argument(left, names, whole=token in "^_") for _ in range(_ARGUMENTS[token]))
            kind = before if before in CALLS and token in "^_" else "^" if token == "^" else ""
        elif token in _KNOWN:
            text = {"{": "(", "}": ")", "[": "(", "]": ")"}.get(token, token)
        else:
            raise NotParsed(token)
        grouped = text.startswith(("(", r"\begin")) or (before == "number" and token == r"\frac")
        times = grouped and before in ("number", "symbol", r"\pi", "e", "i")
        written += (r" \cdot " if times else " ") + text
        before = kind
    return written + (")" if called else "")


def _letter(name: str, left: list[str], names: dict[str, str]) -> str:
    """The letter of a symbol with its index, its primes and, for a function, its argument, which are taken from `left`."""
    if left[:1] == ["_"]:
        left.pop(0)
        name += "_" + " ".join(_group(left))
    while left[:1] == ["'"]:
        name += left.pop(0)
    if left[:1] == ["("] and (name[0] in _APPLIED or (left[2:3] == [")"] and is_number(left[1]))):
        name += f"({' '.join(_group(left))})"
    if name not in names and len(names) == len(_LETTERS):
        raise Unsupported("number of symbols")
    return names.setdefault(name, _LETTERS[len(names) % len(_LETTERS)])


def _group(left: list[str]) -> list[str]:
    """Takes one token, or the content of a group in brackets."""
    if not left:
        raise NotParsed("the end")
    opening = left.pop(0)
    closing = {"{": "}", "(": ")", "[": "]"}.get(opening)
    depth, inside = 1, [] if closing else [opening]
    while closing and depth:
        if not left:
            raise NotParsed(f"no {closing}")
        inside.append(left.pop(0))
        depth += (inside[-1] == opening) - (inside[-1] == closing)
    return inside[:-1] if closing else inside


def _argument(left: list[str], names: dict[str, str], whole: bool = False) -> str:
    """The argument of a command, in braces: of a number the first digit, as in TeX; `whole` takes the number with its sign."""
    sign = left.pop(0) if whole and left[:1] == ["-"] else ""
    if left and not whole and is_number(left[0]) and len(left[0]) > 1:
        if not left[0].isdigit():
            raise NotParsed(left[0])
        left[:1] = [left[0][0], left[0][1:]]
    inside = _group(left)
    while inside and inside[-1] in (r"\frac", r"\sqrt", r"\binom") and left:  # `\frac\sqrt3 2`
        inside += [part for _ in range(_ARGUMENTS[inside[-1]]) for part in ("{", *_group(left), "}")]
    return f"{{{sign}{_explicit(inside, names)}}}"


def number(token: str) -> Fraction:
    """The exact value of a number's token. Raises Unsupported for an exponent beyond the limit."""
    mantissa, _, exponent = token.partition("e")
    if abs(int(exponent or 0)) > MAX_EXPONENT:
        raise Unsupported("exponent")
    if "(" not in mantissa:
        return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
    fixed, period = mantissa.rstrip(")").split("(")
    return Fraction(f"{fixed}0") + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed.partition(".")[2]))


def _checked(parsed: Any) -> Any:
    """The formula with real odd roots of negative numbers, as answers mean them, and not the principal ones.

    Raises Unsupported for powers, factorials and binomials beyond the limits. Their values are estimated, never computed.
    """
    from sympy import Integer, log, preorder_traversal

    for node in preorder_traversal(parsed):
        name, parts = type(node).__name__, [part.evalf(9) for part in node.args]
        if name in ("Pow", "exp"):
            base, exponent = parts if name == "Pow" else (Integer(3), parts[0])
            if exponent.is_number and abs(exponent) > MAX_EXPONENT:
                raise Unsupported("exponent")
            numbers = base.is_number and exponent.is_number and base
            if numbers and abs(exponent * log(abs(base), 2).evalf(9)) > MAX_BITS:
                raise Unsupported("number of digits")
        elif name in ("factorial", "binomial") and any(part.is_number and abs(part) > MAX_FACTORIAL for part in parts):
            raise Unsupported(name)
    return parsed.replace(lambda node: node.is_Pow and node.exp.is_Rational and node.exp.p == 1 and node.exp.q % 2 == 1
                          and bool(node.base.is_negative), lambda root: -((-root.base) ** root.exp))


def exact(node: Any) -> Fraction | None:
    """The exact value of a formula; None if it is not rational."""
    if node.free_symbols:
        return None
    done = node.doit()
    return Fraction(int(done.p), int(done.q)) if done.is_Rational else None


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
        numbers = exact(gold), exact(answer)
        return numbers[0] == numbers[1] if None not in numbers else any(agree(*pair) for pair in values(gold, answer))
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
