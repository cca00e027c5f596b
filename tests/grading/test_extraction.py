"""The final answer of a text: the last balanced box after the thinking, found in linear time."""

from __future__ import annotations

import time

import pytest

from dflash_mcmc.grading.extraction import after_thinking, last_box


@pytest.mark.parametrize(("text", "answer"), [
    (r"so \boxed{42}.", "42"),
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\fbox{7}", "7"),
    (r"\boxed {7}", "7"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\begin{pmatrix}1\\{2}\end{pmatrix}}", r"\begin{pmatrix}1\\{2}\end{pmatrix}"),
    (r"\boxed{5} and \boxed{6", "5"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"} \boxed{5}", "5"),
    (r"<think>\boxed{1}</think> \boxed{2}", "2"),
    (r"<think>\boxed{1}</think> nothing", None),
    (r"<think>\boxed{1}", None),
    (r"<think>a</think> \boxed{1} <think> again", None),
    ("no box", None),
    (r"\boxed{unclosed", None),
    (r"\boxed 5", None),
    ("", None),
    (r"\boxed{}", ""),
    (r"\boxed{" * 3000, None),
])
def test_extraction(text, answer):
    assert last_box(text) == answer


def test_the_time_is_linear():
    text = r"\boxed{" * 150_000
    started = time.perf_counter()
    assert last_box(text) is None
    assert last_box(text + "1" + "}" * 150_000) == "1"
    assert time.perf_counter() - started < 10  # in quadratic time it would be hours


def test_thinking():
    assert after_thinking("a</think>b</think>c") == "c"
    assert after_thinking("plain") == "plain"
    assert after_thinking("<think>a") is None
