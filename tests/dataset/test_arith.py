"""`dataset=arith`: right answers, disjoint splits, and many correct solutions of every problem."""

import re

import pytest

from dflash_mcmc.dataset.arith import LEVELS, NUM_TEST_PROBLEMS, generated_test_problems, make_problem, make_solution
from dflash_mcmc.rng import Key
from tests.refusals import refused
from tests.train.embedded import training_pairs


def test_problems_never_change(make_config):
    """Compares with stored problems. If the generator changed, old records would refer to other problems."""
    problems = make_config().dataset.problems()
    assert problems == generated_test_problems()
    assert len(problems) == NUM_TEST_PROBLEMS >= 200
    assert make_config().dataset.fingerprint() == "4ef88c84db1a977b3e41f1f768468937"


@pytest.mark.slow
def test_more_problems_continue_the_embedded_ones(make_config):
    few, many = make_config().dataset, make_config("dataset.num_problems=320").dataset
    assert len(many.problems()) == 320
    assert many.problems()[:300] == few.problems()
    assert many.fingerprint() != few.fingerprint()
    with refused(start="dataset.num_problems: given 0; allowed: a whole number >= 1"):
        make_config("dataset.num_problems=0")


def test_splits_are_disjoint(make_config):
    asked = {re.sub(r"[A-Z][a-z]+", "", p.question) for p in make_config().dataset.problems()}
    trained = {re.sub(r"[A-Z][a-z]+", "", question) for question, _ in training_pairs(0, 0, 5_000)}
    assert not asked & trained


@pytest.mark.parametrize("level", LEVELS)
def test_every_equation_of_every_solution_is_true(level):
    styles = set()
    for number in range(60):
        problem = make_problem(Key(3).fold_in(number), level, "train")
        assert sum(event.num_operations for event in problem.events) == problem.level == level
        for style in range(10):
            text = make_solution(Key(style).fold_in(number), problem)
            styles.add(re.sub(r"\d+", "", text))
            assert text.endswith(f"\\boxed{{{problem.answer}}}.")
            for chain in re.findall(r"[\d+\-*/=]*=[\d+\-*/=]*", text):
                values = {_value(side) for side in chain.split("=")}
                assert len(values) == 1, text
    assert len(styles) > 20


def test_answers_are_whole_numbers_in_range():
    for number in range(300):
        problem = make_problem(Key(8).fold_in(number), number % 5 + 1, "test")
        count = problem.start
        for event in problem.events:
            assert event.sign != "/" or count % event.number == 0
            count = event.apply(count)
            assert 0 < count <= 9999
        assert count == problem.answer


def test_an_unknown_level_is_refused():
    for level, split in ((0, "train"), (6, "train"), (1, "validation")):
        with pytest.raises(ValueError, match="allowed: levels 1 to 5"):
            make_problem(Key(0), level, split)


def _value(expression: str) -> int:
    """The value of a sum of products and quotients of whole numbers, computed without eval."""
    total = 0
    for sign, term in re.findall(r"([+-]?)([\d*/]+)", expression):
        factors = re.split(r"([*/])", term)
        value = int(factors[0])
        for operator, factor in zip(factors[1::2], factors[2::2], strict=True):
            value = value * int(factor) if operator == "*" else value // int(factor)
        total += -value if sign == "-" else value
    return total
