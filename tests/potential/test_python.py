"""`potential=python`: a function of the user, in a process with limits."""

import pytest

from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.types import Problem
from tests.refusals import refused

FUNCTIONS = '''
import time

LIMIT = 3

def length(problem, text):
    return len(text) + len(problem["question"])

def text(problem, text):
    return "high"

def slow(problem, text):
    time.sleep(60)

def greedy(problem, text):
    return len(bytearray(1 << 33))

def leaves(problem, text):
    raise SystemExit
'''
PROBLEM = Problem("one", "1 + 1", "2")


@pytest.fixture
def configured(make_config, tmp_path):
    """A function from the name of a function to the configuration with it."""
    def of(function: str, *more: str, code: str = FUNCTIONS):
        (tmp_path / "rates.py").write_text(code)
        return make_config("condition=ps", "potential=python", f"potential.path={tmp_path}/rates.py{function}",
                           "potential.on_failure=-2", *more)

    return of


@pytest.mark.slow
def test_the_function_reads_problem_and_text(configured):
    config = configured(":length")
    evaluator = config.potential.start(config)
    assert [evaluator.submit(PROBLEM, text).result().value for text in ("", "abc")] == [5.0, 8.0]
    evaluator.close()


@pytest.mark.parametrize("function", [":text", ":slow", ":greedy", ":leaves"])
def test_a_function_that_fails_gives_a_stated_value_and_the_next_call_is_made(configured, function):
    config = configured(function, "potential.timeout_seconds=2")
    evaluator = config.potential.start(config)
    found = [evaluator.submit(PROBLEM, text).result() for text in ("a", "b")]
    assert [(each.value, each.failed) for each in found] == [(-2.0, True)] * 2
    evaluator.close()


def test_its_file_is_part_of_the_identity(configured):
    first, other = configured(":length"), configured(":length", code=FUNCTIONS.replace("+ len", "- len"))
    digest = identity_hash(other)
    assert digest != identity_hash(configured(":text", code=FUNCTIONS.replace("+ len", "- len")))
    configured(":length")
    assert identity_hash(first) != digest


@pytest.mark.parametrize(("function", "message"), [
    ("", "allowed: FILE:FUNCTION, a file of Python that exists and a function in it"),
    ("x:length", "allowed: FILE:FUNCTION, a file of Python that exists"),
    (":longest", "the file defines the function; it has length, text, slow, greedy, leaves"),
    (":LIMIT", "the file defines the function; it has length"),
])
def test_a_mistake_is_one_line(configured, function, message):
    with refused(message):
        configured(function)


def test_a_file_that_cannot_be_run_is_one_line(configured):
    with refused("rates.py cannot be run: SyntaxError"):
        configured(":length", code="def length(")
    with refused("potential.stop_at_max: given True; allowed: false with potential=python"):
        configured(":length", "potential.stop_at_max=true")
