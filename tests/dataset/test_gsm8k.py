"""`dataset=gsm8k` from a file."""

import json

import pytest

from dflash_mcmc.errors import UserError


def test_gold_is_the_number_after_the_mark_without_separators(make_config, tmp_path):
    rows = [{"question": "q", "answer": "Work 1+1=<<1+1=2>>2\n#### 1,234"}, {"question": "r", "answer": "#### -5"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config("dataset=gsm8k", f"dataset.path={tmp_path}/rows.jsonl", "dataset.check_rows=false")
    problems = config.dataset.problems()
    assert [(p.id, p.answer) for p in problems] == [("gsm8k-0000", "1234"), ("gsm8k-0001", "-5")]


def test_a_row_without_a_final_answer_is_refused(make_config, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "q", "answer": "2"}) + "\n")
    with pytest.raises(UserError, match="row 0 has no final answer"):
        make_config("dataset=gsm8k", f"dataset.path={tmp_path}/rows.jsonl", "dataset.check_rows=false").dataset.problems()


def test_all_real_problems(make_config, shared_data):
    dataset = make_config("dataset=gsm8k", f"dataset.path={shared_data}/gsm8k/test.jsonl").dataset
    problems = dataset.problems()
    assert [problem.id for problem in problems] == [f"gsm8k-{number:04d}" for number in range(1319)]
    assert all(p.answer.lstrip("-").isdigit() for p in problems)
    written = [problem.solution.rpartition("#### ")[2] for problem in problems]
    assert (sum("," in gold for gold in written), sum("-" in gold for gold in written)) == (14, 2)
    assert [problem.answer for problem in problems] == [gold.replace(",", "") for gold in written]
    assert dataset.fingerprint() == "536b7bd32077b6bc104c07394b4d0ecc"
