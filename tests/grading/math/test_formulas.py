"""Formulas: their values, and limits on costly ones."""

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from dflash_mcmc.grading.math.comparing import decide
from dflash_mcmc.grading.math.string_rule import same_string
from dflash_mcmc.grading.verdicts import GIVEN

NUMBERS = [
    (r"\frac 59", r"\frac{5}{9}"), (r"2\frac{5}{3}", r"\frac{10}{3}"), ("5.", "5.0"), ("2e3", "2000"), ("-2^2", "-4"),
    ("(-2)^2", "4"),
    ("2^{-3}", r"\frac18"), (r"\sqrt[3]{-8}", "-2"), (r"\sqrt{\frac{9}{4}}", r"\frac32"), ("|-5|", "5"),
    (r"\lfloor 2.7 \rfloor", "2"),
    ("1/2/3", r"\frac16"), (r"6 \div 3", "2"), ("2(3)", "6"), (r"3 \cdot -2", "-6"), ("8^{1/3}", "2"),
    (r"\sqrt{4+2\sqrt{3}}", r"1+\sqrt{3}"), (r"\cos\frac{\pi}{7}-\cos\frac{2\pi}{7}+\cos\frac{3\pi}{7}", r"\frac{1}{2}"),
    (r"\sin \pi", "0"), (r"\sqrt[3]{2+\sqrt5}+\sqrt[3]{2-\sqrt5}", "1"), (r"\sin x (y + 1)", r"(y+1)\sin(x)"),
    (r"\sqrt{\frac{1}{n}}", r"\frac{1}{\sqrt{n}}"), (r"\ln(x^3)", r"3\ln x"),
]
OTHERS = [
    (r"e^{\pi\sqrt{163}}", "262537412640768744"),  # equal in 30 digits
    (r"\sqrt{2}+10^{-100}", r"\sqrt{2}"), (r"\pi \cdot 10^{-200}", "0"), ("2^{9999}", "2^{9999}+1"), (r"\ln(x^2)", r"2\ln x"),
    (r"\sqrt{xy}", r"\sqrt{x}\sqrt{y}"), (r"y=\sqrt{3}x", r"y=\sqrt{2}x"), ("x2", "2x"), ("2 3", "6"),
    (r"\sqrt12", r"\sqrt{12}"),
]


@pytest.mark.parametrize(("gold", "answer", "verdict"), [*((*pair, "correct") for pair in NUMBERS),
                                                         *((*pair, "wrong") for pair in OTHERS)])
def test_formulas_are_equal_where_their_values_are(gold, answer, verdict):
    assert decide(gold, answer).verdict == decide(answer, gold).verdict == verdict


@pytest.mark.parametrize(("answer", "limit"), [
    ("1" * 401, "length"), ("1" * 61, "digits"), ("(" * 26 + "1" + ")" * 26, "nesting"), (r"\sum_{n=1}^{9} n", "sum"),
    ("10^{10^{10}}", "exponent")])
def test_an_exceeded_limit_gives_the_verdict_unsupported(answer, limit):
    decision = decide("45", answer)
    assert (decision.verdict, decision.rule) == ("unsupported", limit)


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


@settings(FEW, max_examples=120)
@given(st.one_of(st.text(max_size=60), PIECES), answers)
def test_any_text_is_graded_without_error_or_timeout(math_pool, text, gold):
    math_pool.submit(0, text, gold)
    math_pool.submit_answer(1, text, gold)
    found = dict(math_pool.finished(wait=True))
    assert {grade.verdict for grade in found.values()} <= set(GIVEN) - {"error", "timeout"}
    same_string(gold, text)
