"""`potential=regex`, and what every evaluator does: it rates a text of a problem once, and counts failures."""

import math

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Evaluated
from dflash_mcmc.potential import Evaluator
from dflash_mcmc.types import Problem
from tests.refusals import refused

ONE, TWO = Problem("one", "", ""), Problem("two", "", "")


def test_a_pattern_is_searched_in_the_answer(make_config):
    config = make_config("condition=ps", "potential=regex", r"potential.pattern='^\d+$'")
    evaluator = config.potential.start(config)
    assert [evaluator.submit(ONE, text).result().value for text in ("12", "a", "")] == [1.0, 0.0, 0.0]
    evaluator.close()


def test_a_pattern_that_does_not_compile_is_one_line(make_config):
    with refused("potential.pattern: given '('; allowed: a regular expression of Python: missing )"):
        make_config("condition=ps", "potential=regex", "potential.pattern='('")
    with refused("potential.pattern: not given"):
        make_config("condition=ps", "potential=regex")


def test_a_text_of_a_problem_is_rated_once():
    asked = list[tuple[str, str]]()

    def rate(problem: Problem, text: str) -> float:
        asked.append((problem.id, text))
        return float(len(asked))

    evaluator = Evaluator(rate)
    values = [evaluator.submit(problem, text).result().value for problem, text in
              ((ONE, "a"), (TWO, "a"), (ONE, "b"), (ONE, "a"), (TWO, "a"))]
    assert values == [1.0, 2.0, 3.0, 1.0, 2.0]
    assert asked == [("one", "a"), ("two", "a"), ("one", "b")]
    evaluator.close()


@pytest.mark.parametrize("fails", [lambda: math.nan, lambda: math.inf, lambda: "text", lambda: None, lambda: 1 / 0])
def test_a_failure_is_a_stated_value(fails):
    evaluator = Evaluator(lambda problem, text: fails(), on_failure=-1.0)
    found = evaluator.submit(ONE, "a").result()
    assert found == Evaluated(-1.0, found.seconds, True)
    evaluator.close()


def test_what_can_rate_nothing_ends_the_run():
    def broken(problem: Problem, text: str) -> float:
        raise UserError("the sandbox is gone")

    evaluator = Evaluator(broken)
    with refused("the sandbox is gone"):
        evaluator.submit(ONE, "a").result()
    evaluator.close()
