"""Examples of a function: calls with literal arguments, and the results that a text states for them."""

import pytest

from dflash_mcmc.grading.extraction import function_of, in_assertions, in_docstring
from dflash_mcmc.types import Example


@pytest.mark.parametrize(("text", "call", "check"), [
    (">>> f(1)\n    2\n", "f(1)", "assert (f(1)) == 2"),
    (">>> f(1)  # one\n    2\n", "f(1)", "assert (f(1)) == 2"),
    (">>> f('a')\n    ['b',\n     'c']\n", "f('a')", "assert (f('a')) == ['b', 'c']"),
    (">>> round(f([1]), 2) # a root\n    -0.5\n", "f([1])", "assert abs(round(f([1]), 2) - -0.5) < 1e-06"),
    (">>> f([1, 2]) [2, 1]\n", "f([1, 2])", "assert (f([1, 2])) == [2, 1]"),
    ("f(1) == 2", "f(1)", "assert (f(1)) == 2"),
    ("for f(1) = 2", "f(1)", "assert (f(1)) == 2"),
    ("* f(1) => 2", "f(1)", "assert (f(1)) == 2"),
    ("f(1)==>2", "f(1)", "assert (f(1)) == 2"),
    ("f(1) \u279e True", "f(1)", "assert (f(1)) == True"),
    ("f(1) -> false.", "f(1)", "assert (f(1)) == False"),
    ("f(1) should return 16.", "f(1)", "assert (f(1)) == 16"),
    ("f(15)   # returns 'a'", "f(15)", "assert (f(15)) == 'a'"),
    ("f(1) # => 'No' (the name is wrong)", "f(1)", "assert (f(1)) == 'No'"),
    ("f('a)', 3) ->3 - 1 = 2", "f('a)', 3)", "assert (f('a)', 3)) == 2"),
    ("f(1) ->3 - 1", "f(1)", ""),
    ("f([\n [1],\n [2]], 1) == [(0, 0)]", "f([\n [1],\n [2]], 1)", "assert (f([\n [1],\n [2]], 1)) == [(0, 0)]"),
    (">>> f(1)\n\n    >>> g(2)\n    3", "f(1)", ""),
    ("such as f(1)", "f(1)", ""),
])
def test_a_call_and_its_result(text, call, check):
    assert in_docstring(text, "f") == (Example(call, check),)


@pytest.mark.parametrize("text", ["f(n) == 2", "f() is", "g(1) == 2", "if(1) == 2", "f(1", "f(x=y) == 1", "f(g(1)) == 1"])
def test_what_is_no_example(text):
    assert in_docstring(text, "f") == ()


def test_a_call_counts_once_with_its_first_result():
    assert in_docstring("see f(1)\nf(1) == 2\nf(1) == 3\nf(2) == 1", "f") == (
        Example("f(1)", "assert (f(1)) == 2"), Example("f(2)", "assert (f(2)) == 1"))


def test_assertions_are_examples_as_they_are():
    assert in_assertions(["assert set(f(1, a=[2])) == {3}", "assert f(x) == 1"], "f") == (
        Example("f(1, a=[2])", "assert set(f(1, a=[2])) == {3}"), Example("", "assert f(x) == 1"))


@pytest.mark.parametrize(("test", "function"), [("assert set(f(1)) == {2}", "f"), ("assert sum(10, 15) == 6", "sum"),
                                                ("assert math.isclose(f(1), 2)", "f")])
def test_the_function_of_an_assertion(test, function):
    assert function_of(test) == function
