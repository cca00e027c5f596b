"""Properties of the decision: appearance does not matter, each answer equals itself, and the comparison is symmetric."""

from __future__ import annotations

import contextlib

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_mcmc.grading.math.comparing import decide
from dflash_mcmc.grading.math.reading import readings
from dflash_mcmc.grading.math.string_rule import same_string
from dflash_mcmc.grading.verdicts import GIVEN, Unsupported

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
