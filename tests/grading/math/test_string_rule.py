"""The string rule of published results: pairs that it accepts and rejects, as in its source."""

from __future__ import annotations

import pytest

from dflash_mcmc.grading.math.string_rule import same_string

EQUAL = [
    ("42", "42"), ("0.5", r"\frac{1}{2}"), (r"\frac12", r"\frac{1}{2}"), (r"\frac1{72}", r"\frac{1}{72}"), ("1/2",
    r"\frac{1}{2}"),
    (r"\dfrac{1}{2}", r"\tfrac{1}{2}"), (r"\sqrt2", r"\sqrt{2}"), (r"90^\circ", "90"), (r"\$36", "36"), (r"50\%", "50"),
    ("x=5", "5"),
    (r"\left(1,2\right)", "(1,2)"), ("58,500", "58500"), (r"10,\!080", "10080"), (r"\text{Evelyn}", "evelyn"), ("5.0", "5"),
    (".5", "0.5"), (r"5 \text{ cents}", "5"), ("(1, 2)", "(1,2.0)"), ("12 cm", "12"),
]
DIFFERENT = [
    ("42", "24"), (r"\frac{1}{2}", r"\frac{2}{4}"), ("(1,2)", "[1,2]"), ("(1,2)", "(2,1)"), (r"2\sqrt{3}", r"\sqrt{12}"),
    ("1,2", "2,1"),
    (r"\text{even}", r"\text{odd}"), ("5", ""), ("x^2", "x^3"), (r"\pi", "3.14"), ("y=5", "x+y=5"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold, answer):
    assert same_string(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold, answer):
    assert not same_string(gold, answer)
