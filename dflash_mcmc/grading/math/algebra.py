"""The last step of a comparison: whether two formulas are equal, by their values and by math-verify.

math-verify has parsing rules that lose information: it drops indices and primes, ignores the case of letters and reads `x^T`
as x. To avoid these rules, math-verify gets LaTeX that is written from our own parse tree, with one plain letter for each
symbol. Two checks come first, without math-verify. Formulas whose values differ at some point are not equal. Numbers are
compared by their values only, because math-verify accepts any two numbers that differ by less than 1e-15.

These functions run in grading processes only, because they can take long.
"""

from __future__ import annotations

from dflash_mcmc.grading.limits import Unsupported
from dflash_mcmc.grading.math.formulas import Node
from dflash_mcmc.grading.math.values import differ, exact, has, same_constant, symbols

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
