"""Formulas: complete parsing, exact values, and limits on costly ones."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import mpmath
import pytest
import sympy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_mcmc.grading.math.comparing import decide
from dflash_mcmc.grading.math.reading import readings
from dflash_mcmc.grading.math.string_rule import same_string
from dflash_mcmc.grading.math.syntax import NotParsed, parse
from dflash_mcmc.grading.math.tokens import tokenise
from dflash_mcmc.grading.math.values import differ, exact, parsed_latex, ratio, same_constant, symbols, to_latex
from dflash_mcmc.grading.verdicts import GIVEN, Unsupported

EXACT = {
    r"\frac12": Fraction(1, 2), r"\frac{1}2": Fraction(1, 2), r"\frac 59": Fraction(5, 9), "1 4/5": Fraction(9, 5),
    r"137 \frac{1}{2}": Fraction(275, 2), r"2\frac{5}{3}": Fraction(10, 3), ".5": Fraction(1, 2), "5.": Fraction(5),
    "6.7e-5": Fraction(67, 10**6), "2e3": Fraction(2000), r"0.1\overline{6}": Fraction(1, 6), "2^10": Fraction(1024),
    "-2^2": Fraction(-4),
    "(-2)^2": Fraction(4), "2^{-3}": Fraction(1, 8), "4!": Fraction(24), r"\binom{5}{2}": Fraction(10),
    r"\sqrt{16}": Fraction(4),
    r"\sqrt[3]{-8}": Fraction(-2), r"\sqrt{\frac{9}{4}}": Fraction(3, 2), r"|-5|": Fraction(5),
    r"\lfloor 2.7 \rfloor": Fraction(2),
    "1/2/3": Fraction(1, 6), r"6 \div 3": Fraction(2), "2(3)": Fraction(6), r"3 \cdot -2": Fraction(-6),
    "8^{1/3}": Fraction(2),
}


@pytest.mark.parametrize(("text", "value"), EXACT.items(), ids=EXACT)
def test_exact_values(text, value):
    assert exact(node_of(text)) == value


def node_of(text: str):
    return parse(tuple(tokenise(text)))


def test_the_grammar_agrees_with_another_parser():
    """For LaTeX that math-verify parses correctly, its grammar gives the same formulas."""
    for text in (r"\frac{x+1}{2}", "x^2-3x+2", r"\sin(x)\cos(y)", r"\sqrt{x+y}", r"2\pi x", r"\frac{\sqrt{3}}{3}",
    "(a+5)(b+2)",
                 r"\ln(x)+e^{x}", r"x^{y}", r"-\frac{x}{y}", r"|x-1|"):
        node = node_of(text)
        letters = {name: name for name in symbols(node)}
        (ours,), (theirs,) = parsed_latex(to_latex(node, letters)), parsed_latex(text)
        assert sympy.simplify(ours - theirs) == 0, text


@pytest.mark.parametrize("text", ["x2", "2 3", "x +", r"\frac{1}", "(x", "x)", r"\foo", r"\text{word} x", r"\sqrt12", "",
"+", "x_",
                                  r"1,2", "x=1", r"\overline{AB}", r"\sin", "|x", "x^"])
def test_unknown_syntax_is_not_parsed(text):
    with pytest.raises(NotParsed):
        node_of(text)


@pytest.mark.parametrize(("text", "limit"), [
    ("9^9^9", "power of a power"), (r"9^{9^{9^{9}}}", "exponent"), ("2^{99999}", "exponent"), ("1e99999", "exponent"),
    ("9999^{9999}" * 30, "number of digits"), ("1000!", "factorial"), ("(2+3)!", "factorial"), (r"\binom{1000}{2}",
    "binomial"),
    (r"\sum n", "sum"), (r"\int x", "int"), ("-" * 3000 + "1", "nesting"), ("|" * 3000, "nesting"),
])
def test_limits_are_checked_before_the_computation(text, limit):
    with pytest.raises(Unsupported, match=limit):
        exact(node_of(text))


@pytest.mark.parametrize(("answer", "limit"), [("1" * 401, "length"), ("1" * 61, "digits"), ("(" * 26 + "1" + ")" * 26,
"nesting"),
                                               (r"\sum_{n=1}^{9} n", "sum"), ("10^{10^{10}}", "exponent")])
def test_an_exceeded_limit_gives_the_verdict_unsupported(answer, limit):
    decision = decide("45", answer)
    assert (decision.verdict, decision.rule) == ("unsupported", limit)


def test_constants_are_compared_in_150_digits():
    assert same_constant(node_of(r"\sqrt{4+2\sqrt{3}}"), node_of(r"1+\sqrt{3}"))
    assert same_constant(node_of(r"\cos\frac{\pi}{7}-\cos\frac{2\pi}{7}+\cos\frac{3\pi}{7}"), node_of(r"\frac{1}{2}"))
    assert same_constant(node_of(r"\sin \pi"), node_of("0"))
    assert same_constant(node_of(r"\sqrt[3]{2+\sqrt5}+\sqrt[3]{2-\sqrt5}"), node_of("1"))
    assert not same_constant(node_of(r"e^{\pi\sqrt{163}}"), node_of("262537412640768744"))  # equal in 30 digits
    assert not same_constant(node_of(r"\sqrt{2}+10^{-100}"), node_of(r"\sqrt{2}"))
    assert not same_constant(node_of(r"\pi \cdot 10^{-200}"), node_of("0"))
    assert not same_constant(node_of(r"\ln 0"), node_of(r"\ln 0"))  # it has no value
    with mpmath.workdps(40):
        assert abs(mpmath.exp(mpmath.pi * mpmath.sqrt(163)) - 262537412640768744) < 1e-11  # the numbers are indeed that close


def test_formulas_with_different_values_differ():
    assert differ(node_of("x+1"), node_of("x+2"))
    assert differ(node_of("x_1"), node_of("x_2"))
    assert differ(node_of(r"1 - \frac{1}{(1+\omega)^{1997}}"), node_of("1"))
    assert not differ(node_of(r"\sin 2x"), node_of(r"2\sin x\cos x"))
    assert not differ(node_of("(x+y)^2"), node_of("x^2+2xy+y^2"))


def test_ratio_of_proportional_formulas():
    assert ratio(node_of("2x-4y+6"), node_of("x-2y+3")) == 2
    assert ratio(node_of("3-x"), node_of("2x-6")) == Fraction(-1, 2)
    assert ratio(node_of("x+1"), node_of("x+2")) is None
    assert ratio(node_of(r"\sin x"), node_of("x")) is None


def test_an_answer_with_too_many_letters_is_unsupported():
    letters = "+".join("abcdfghklmnopqrstuvwxyzABCD")
    assert decide(f"{letters}+1-1", letters).rule == "number of symbols"


# Properties of the decision: appearance does not matter, each answer equals itself, and the comparison is symmetric.

FEW = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

integers = st.integers(-999, 999).map(str)
fractions = st.tuples(st.sampled_from(["", "-"]), st.integers(1, 99), st.integers(2, 99)).map(
    lambda parts: rf"{parts[0]}\frac{{{parts[1]}}}{{{parts[2]}}}")
decimals = st.tuples(st.integers(0, 99), st.integers(1, 99)).map(lambda parts: f"{parts[0]}.{parts[1]}")
radicals = st.tuples(st.integers(2, 9), st.integers(2, 30)).map(lambda parts: rf"{parts[0]} \sqrt{{{parts[1]}}}")
angles = st.sampled_from([r"\pi", r"\frac{\pi}{6}", r"2 \pi + 1", r"\infty"])
polynomials = st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from("abxy"), st.sampled_from("kmn")).map(
    lambda parts: f"{parts[0]} {parts[2]}^{{2}} - {parts[1]} {parts[3]} + 1")
numbers = st.one_of(integers, fractions, decimals, radicals)
scalars = st.one_of(numbers, angles, polynomials)
tuples = st.lists(scalars, min_size=2, max_size=4).map(lambda items: rf"\left( {', '.join(items)} \right)")
intervals = st.tuples(st.sampled_from("(["), numbers, numbers, st.sampled_from(")]")).map(
    lambda parts: rf"\left{parts[0]} {parts[1]}, {parts[2]} \right{parts[3]}")
sets = st.lists(numbers, min_size=1, max_size=4).map(lambda items: rf"\left\{{ {', '.join(items)} \right\}}")
lists = st.lists(numbers, min_size=2, max_size=4).map(", ".join)
matrices = st.lists(numbers, min_size=2, max_size=3).map(
    lambda items: r"\begin{pmatrix} " + r" \\ ".join(items) + r" \end{pmatrix}")
words = st.sampled_from([r"\text{east}", r"\text{(C)}", r"\text{even}", "52_8", "x = 5", r"90^\circ", r"\$36", r"50\%"])
answers = st.one_of(scalars, tuples, intervals, sets, lists, matrices, words)

PIECES = st.lists(st.sampled_from([*r"\{}[]()^_-+=,.|$%!&012xyπ ", r"\frac", r"\sqrt", r"\text{"]), max_size=40).map("".join)
STYLES = [
    lambda text: text.replace(r"\frac", r"\dfrac"), lambda text: text.replace(r"\left", "").replace(r"\right", ""),
    lambda text: text.replace(" ", ""), lambda text: text.replace(" ", "  "), lambda text: text.replace(" ", r"\, "),
    lambda text: f"${text}$", lambda text: f"{{{text}}}", lambda text: rf"\displaystyle {text}", lambda text: f"{text}.",
    lambda text: rf"\boxed{{{text}}}", lambda text: text.replace("pmatrix", "bmatrix"), lambda text: text.replace("-", "−"),
    lambda text: text.replace(r"\pi", "π").replace(r"\infty", "∞"),
    lambda text: text if r"\text" in text else text.replace("(", r"\bigl(").replace(r"\left\bigl(", "("),
]


@FEW
@given(answers, st.lists(st.sampled_from(STYLES), min_size=1, max_size=3))
def test_appearance_does_not_matter(answer, styles):
    other = answer
    for style in styles:
        if r"\pi" not in other or style is not STYLES[2]:
            other = style(other)
    assert decide(answer, other).verdict == "correct", other


@FEW
@given(numbers, st.sampled_from([r"\text{ cm}", r" \text{ square feet}", r"\mbox{ inches}", r"\ \text{apples}", r"\%",
                                 r"^\circ"]))
def test_a_unit_may_be_left_out(number, unit):
    assert decide(number, number + unit).verdict == decide(number + unit, number).verdict == "correct"


@FEW
@given(answers)
def test_each_answer_equals_itself(answer):
    assert decide(answer, f"{{{answer}}}").verdict == "correct"


@settings(FEW, max_examples=150)
@given(answers, answers)
def test_the_comparison_is_symmetric(a, b):
    assert decide(a, b).verdict == decide(b, a).verdict


@FEW
@given(st.lists(numbers, min_size=2, max_size=4), st.data())
def test_the_order_matters_in_tuples_but_not_in_lists_and_sets(items, data):
    shuffled = data.draw(st.permutations(items))
    assert decide(", ".join(items), ", ".join(shuffled)).verdict == "correct"
    assert decide(rf"\{{{','.join(items)}\}}", rf"\{{{', '.join(shuffled)}\}}").verdict == "correct"
    same = all(decide(a, b).verdict == "correct" for a, b in zip(items, shuffled, strict=True))
    assert (decide(f"({','.join(items)})", f"({', '.join(shuffled)})").verdict == "correct") == same


@FEW
@given(st.integers(-10**6, 10**6), st.integers(1, 10**4), st.integers(1, 50))
def test_rational_numbers_are_compared_exactly(over, under, factor):
    gold = rf"\frac{{{over}}}{{{under}}}"
    assert decide(gold, rf"\frac{{{over * factor}}}{{{under * factor}}}").verdict == "correct"
    assert decide(gold, rf"\frac{{{over * factor + 1}}}{{{under * factor}}}").verdict == "wrong"


@settings(FEW, max_examples=120)
@given(st.one_of(st.text(max_size=60), PIECES), answers)
def test_any_text_is_graded_without_error_or_timeout(math_pool, text, gold):
    math_pool.submit(0, text, gold)
    math_pool.submit_answer(1, text, gold)
    found = dict(math_pool.finished(wait=True))
    assert {grade.verdict for grade in found.values()} <= set(GIVEN) - {"error", "timeout"}
    same_string(gold, text)


@FEW
@given(st.text(alphabet=r"\{}[]()^_-+=,.|$%!&012xyAB pm" + "\x00\ud800", max_size=80))
def test_reading_raises_only_unsupported(text):
    with contextlib.suppress(Unsupported):
        assert readings(text)
