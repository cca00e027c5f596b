"""Formulas: complete parsing, exact values, and limits on costly ones."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import pytest
import sympy

from dflash_mcmc.grading.math.comparing import decide
from dflash_mcmc.grading.math.syntax import NotParsed, parse
from dflash_mcmc.grading.math.tokens import tokenise
from dflash_mcmc.grading.math.values import differ, exact, parsed_latex, ratio, same_constant, symbols, to_latex
from dflash_mcmc.grading.verdicts import Unsupported

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
