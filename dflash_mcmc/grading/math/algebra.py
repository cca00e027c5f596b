"""The last step: whether two formulas are equal, by math-verify, in a grading process alone.

math-verify reads LaTeX in ways of its own: it drops indices and primes, folds the case of letters and takes `x^T` for x. It is
given formulas that were parsed already, written anew with one plain letter for each symbol, so that none of these can matter.
Formulas whose values differ are not equal, whatever it says; and numbers, of which it takes any two closer than 1e-15 for one,
are compared by their values alone.
"""

from __future__ import annotations

from dflash_mcmc.grading.limits import Unsupported
from dflash_mcmc.grading.math.formulas import Node
from dflash_mcmc.grading.math.values import differ, exact, has, same_constant, symbols

_LETTERS = "xyzabcklmnpqrstuvwgh"
"""Letters that math-verify takes for variables wherever they stand."""


def equal(gold: Node, answer: Node) -> bool:
    """Whether two formulas are equal. Raises Unsupported for more symbols than there are letters, and for limits."""
    if gold == answer:
        return True
    if has(gold, "constant", "oo") or has(answer, "constant", "oo"):
        return False
    values = exact(gold), exact(answer)
    if None not in values:
        return values[0] == values[1]
    if not symbols(gold) | symbols(answer):
        return same_constant(gold, answer)
    if differ(gold, answer):
        return False
    return verified(gold, answer)


def verified(gold: Node, answer: Node) -> bool:
    """Whether math-verify takes two formulas for equal. The settings had the fewest wrong acceptances on labelled pairs."""
    from math_verify import verify

    names = sorted(symbols(gold) | symbols(answer))
    if len(names) > len(_LETTERS):
        raise Unsupported("number of symbols")
    letters = dict(zip(names, _LETTERS, strict=False))
    parsed = [parsed_latex(to_latex(node, letters)) for node in (gold, answer)]
    # Without time limits of its own: those would make a slow answer a plain "not equal". The pool has the one limit.
    return bool(verify(*parsed, float_rounding=15, numeric_precision=30, strict=True, allow_set_relation_comp=False,
                       timeout_seconds=None))


def parsed_latex(latex: str) -> list:
    """What math-verify makes of LaTeX, which is canonical already: nothing is normalised. Empty where it cannot be parsed."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    as_it_stands = NormalizationConfig(basic_latex=False, units=False, malformed_operators=False, nits=False, boxed="none",
                                       equations=False)
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=as_it_stands)]
    return parse(f"${latex}$", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)


def to_latex(node: Node, letters: dict[str, str]) -> str:
    """LaTeX of a formula: products with their sign, arguments in brackets, numbers as fractions of whole ones."""
    if node.kind == "number":
        value = node.value
        return str(value.numerator) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    if node.kind == "symbol":
        return letters[node.value]
    if node.kind == "constant":
        return {"pi": r"\pi", "e": "e", "i": "I", "oo": r"\infty"}[node.value]
    parts = [to_latex(part, letters) for part in node.parts]
    if node.kind == "call":
        return _call(node.value, parts)
    if node.kind == "root":
        return rf"({parts[0]})^{{\frac{{1}}{{{node.value}}}}}"
    if node.kind in _CHAINS and node.parts[0].kind == node.kind:  # a + b + c is no deeper than a + b
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
