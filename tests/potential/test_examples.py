"""`potential=examples`: programs that pass the examples of their question, in the sandbox and in a run."""

import json

import numpy as np

from dflash_mcmc.chains import build
from dflash_mcmc.grading.extraction import examples_in
from dflash_mcmc.types import Problem
from tests.refusals import refused

QUESTION = 'def f(x):\n    """Adds one.\n    >>> f(1)\n    2\n    >>> f(2)\n    3\n    """\n'
GOLD = json.dumps({"prompt": QUESTION, "test": "def check(f):\n    assert f(5) == 6", "entry_point": "f"})
PROBLEM = Problem("one", QUESTION, GOLD, examples=examples_in(QUESTION, "f"))
CODE = ("condition=ps", "grader=code", "grader.allow_execution=true", "grader.walls=available", "potential=examples")


def test_a_program_has_the_share_of_its_examples(make_config):
    config = make_config(*CODE)
    evaluator = config.potential.start(config)
    texts = ("    return x + 1\n", "    return 2 * x\n", "    return 0\n", "", "    import os; os._exit(0)\n")
    found = [evaluator.submit(PROBLEM, text).result() for text in texts]
    assert [each.value for each in found] == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert not any(each.failed for each in found)
    assert evaluator.submit(PROBLEM._replace(id="two", question="Add one."), texts[0]).result().value == 0.0
    evaluator.close()


def test_a_plan_counts_questions_without_examples(make_config):
    remarks = make_config(*CODE).potential.remarks([PROBLEM, PROBLEM._replace(examples=())])
    assert remarks[1] == "potential=examples: 1 of 2 questions have no examples; r is 0 for their answers"


def test_it_needs_a_grader_that_runs_programs(make_config):
    with refused("grader: given 'math'; allowed: code with potential=examples"):
        make_config("condition=ps", "potential=examples")


def test_a_tilt_reads_texts_as_the_grader_does(make_config):
    config = make_config(*CODE, "potential.beta=4")
    evaluator = config.potential.start(config)

    class Target:
        tokenizer = type("Tokens", (), {"decode": staticmethod(lambda tokens, skip_special_tokens: "")})

        @staticmethod
        def decode(tokens):
            return "    return x + 1\n"

    tilt = build.tilt_of(config, evaluator, PROBLEM, np.array([1]), Target())
    assert (tilt.beta, tilt.bounds, tilt.stop_at_max) == (4.0, (0.0, 1.0), False)
    assert tilt.evaluate(np.array([1])).result().value == 1.0
    evaluator.close()
