"""The answers that probes teacher-force."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mcmc.dataset.arith import Arith
from dflash_mcmc.errors import UserError
from dflash_mcmc.forcing.answers import Answer, answers, check_source
from dflash_mcmc.probe import Unit, Work
from dflash_mcmc.store.reading import read_records
from dflash_mcmc.types import Problem
from tests.runs import execute


@pytest.fixture
def found(make_config):
    """The answers of a configuration: found("gold", "dataset.limit=3")."""

    def get(source, *overrides):
        config = make_config(*overrides)
        work = Work([Unit(problem.id) for problem in config.dataset.problems()], "cpu")
        return config, dict(answers(config, config.model.load("cpu"), work, source))

    return get


def test_gold_is_the_solution_behind_the_prompt(found):
    config, given = found("gold", "dataset.limit=3")
    model = config.model.load("cpu")
    for problem in config.dataset.problems():
        answer = given[Unit(problem.id)]
        assert model.decode(answer.tokens) == problem.solution
        assert problem.question in model.decode(answer.prompt)
        np.testing.assert_array_equal(answer.sequence, np.concatenate([answer.prompt, answer.tokens]))


def test_greedy_is_what_the_greedy_sampler_draws(found, make_config):
    config, given = found("greedy", "dataset.limit=3", "sampler=greedy")
    folder = execute(config).folder
    records = read_records(folder)
    assert {record["problem"]: record["tokens"] for record in records} == {
        unit.problem: answer.tokens.tolist() for unit, answer in given.items()}


def test_what_cannot_be_measured_says_why():
    prompt, some = np.arange(3), np.arange(5)
    assert Answer(prompt, some).skipped(5) is None
    assert Answer(prompt, some).skipped(6) == "shorter than 6 tokens"
    assert Answer(prompt, some[:0]).skipped() == "empty"
    assert Answer(prompt, some[:0], "not numbers").skipped() == "not numbers"


def test_an_empty_solution_is_an_empty_answer(found, monkeypatch):
    monkeypatch.setattr(Arith, "problems", lambda self: [Problem("a", "How many?", "1", solution="")])
    assert found("gold")[1][Unit("a")].skipped() == "empty"


def test_an_answer_longer_than_the_positions_is_one_line(found, monkeypatch):
    monkeypatch.setattr(Arith, "problems", lambda self: [Problem("a", "How many?", "1", solution="1 2 3 4 " * 400)])
    with pytest.raises(UserError, match=r"dataset: the solution of problem a takes \d+ tokens after a prompt of \d+; "
                                        r"allowed: 1024 positions together"):
        found("gold")
    with pytest.raises(UserError, match=r"dataset.max_new_tokens: given 1024; allowed: at most"):
        found("greedy", "dataset.max_new_tokens=1024")


def test_gold_without_solutions_is_one_line(make_config, monkeypatch):
    config = make_config()
    check_source(config, "probe.answers", "gold")
    monkeypatch.setattr(Arith, "problems", lambda self: [Problem("a", "How many?", "1")])
    check_source(config, "probe.answers", "greedy")
    with pytest.raises(UserError, match=r"probe.answers: given 'gold'; allowed: 'greedy', since there are problems of "
                                        "dataset=arith without a solution"):
        check_source(config, "probe.answers", "gold")
