"""`dataset=aime24`: the real file, and zeros of gold answers."""

import json

from dflash_mcmc.types import Problem


def test_gold_answers_keep_their_zeros(make_config, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": 67, "problem": "q", "solution": "s", "answer": "025", "url": "u"}))
    config = make_config("dataset=aime24", f"dataset.path={tmp_path}/rows.jsonl", "dataset.check_rows=false")
    assert config.dataset.problems() == [Problem("aime24-67", "q", "025", solution="s")]


def test_all_real_problems(make_config, shared_data):
    dataset = make_config("dataset=aime24", f"dataset.path={shared_data}/aime2024/test.jsonl").dataset
    problems = dataset.problems()
    assert [problem.id for problem in problems] == [f"aime24-{number}" for number in range(60, 90)]
    assert all(len(problem.answer) == 3 and problem.answer.isdigit() and problem.solution for problem in problems)
    golds = [problem.answer for problem in problems]
    assert [gold for gold in golds if gold[0] == "0"] == ["025", "073", "023", "045", "033", "080", "055"]
    assert dataset.fingerprint() == "d229d53aa6a0dadddb074dcbb6e2f365"
