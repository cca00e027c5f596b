"""What a program does on the examples of its question, in the sandbox and as records have it."""

import functools
import json

import pytest

from dflash_mcmc.grading.code import ProgramPool, behaviour, calls_of, share_passed
from dflash_mcmc.grading.code.sandbox import Limits, find_sandbox
from dflash_mcmc.types import Example

EXAMPLES = (Example("f(1)", "assert f(1) == 2"), Example("f(2)", "assert f(2) == 3"), Example("f(3)", ""))
RIGHT, HALF, WRONG = "def f(x):\n    return x + 1", "def f(x):\n    return 2 * x", "def f(x):\n    return 9"


@pytest.fixture(scope="module")
def run():
    """A function that runs a program in a sandbox."""
    return functools.partial(find_sandbox()[0].run, entry_point="f", limits=Limits(10, 1))


@pytest.mark.slow
def test_the_share_of_examples_that_pass(run):
    assert [share_passed(run, program, EXAMPLES) for program in (RIGHT, HALF, WRONG, "def f(")] == [1.0, 0.5, 0.0, 0.0]
    assert share_passed(run, RIGHT, EXAMPLES[2:]) is None
    assert share_passed(run, WRONG, EXAMPLES[:1]) == 0.0


@pytest.mark.parametrize("lie", [
    "print('tests')", "raise SystemExit(0)", "import os; os._exit(0)", "raise AssertionError",
    "import sys; sys.stdout.close()", "raise type('returned_' + '0' * 32, (BaseException,), {})",
    "import os\nfor each in range(3, 64):\n"
    "    try:\n        os.write(each, b'tests')\n    except OSError:\n        pass\nos._exit(0)"])
def test_a_program_that_states_its_own_verdict_has_none(run, lie):
    assert share_passed(run, f"{WRONG}\n{lie}", EXAMPLES) == 0.0


def test_programs_that_return_the_same_are_a_class(run):
    same = behaviour(run, "def f(n):\n    return 1 + n", EXAMPLES)
    assert same
    assert behaviour(run, RIGHT, EXAMPLES) == same
    assert behaviour(run, HALF, EXAMPLES) != same
    assert behaviour(run, "def f(x):\n    return str(x + 1)", EXAMPLES) != same
    sets = [behaviour(run, f"def f(x):\n    return {{'a', 'b', 'c', str(x)}}{then}", EXAMPLES) for then in ("", " | set()")]
    assert sets[0] == sets[1]  # texts have another hash in each process, and sets another order


@pytest.mark.parametrize("program", ["def f(x):\n    raise KeyError", "def f(x):\n    while True: pass", "def f(",
                                     "def g(x):\n    return 1"])
def test_a_program_that_returns_nothing_has_no_class(program):
    quick = functools.partial(find_sandbox()[0].run, entry_point="f", limits=Limits(1, 1))
    assert behaviour(quick, program, EXAMPLES) is None


def test_calls_with_one_argument_changed():
    assert calls_of([Example("f(1, True)", "")]) == ["f(1, True)", "f(2, True)", "f(0, True)", "f(-1, True)", "f(1, False)"]
    assert calls_of([Example("f('ab', [3])", "")]) == [
        "f('ab', [3])", "f('', [3])", "f('ba', [3])", "f('abab', [3])", "f('a', [3])", "f('ab', [])", "f('ab', [3, 3])"]
    assert len(calls_of([Example(f"f({number}, 'abc')", "") for number in range(9)])) == 24
    assert calls_of([Example("", "assert f(x)")]) == []


def test_records_have_what_programs_do_where_it_is_asked_for():
    question = "Add one. Your code should pass this test:\n\nassert f(1) == 2\n"
    gold = json.dumps({"test_list": ["assert f(5) == 6"]})
    for asked in (True, False):
        pool = ProgramPool(10, 1, 1, all_walls=False, examples=asked)
        for tag, text in enumerate((RIGHT, HALF, "")):
            pool.submit(tag, text, gold, question)
        grades = dict(pool.finished(wait=True))
        pool.close()
        assert [grades[tag].verdict for tag in range(3)] == ["correct", "wrong", "no_answer"]
        assert [grades[tag].passed for tag in range(3)] == ([1.0, 1.0, None] if asked else [None] * 3)
        assert [bool(grades[tag].behaviour) for tag in range(3)] == [asked, asked, False]
        assert list(grades[2].shown()) == []
