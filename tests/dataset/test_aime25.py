"""`dataset=aime25`: the real file, compared with published answers."""

import json

ANSWERS = (70, 588, 16, 117, 279, 504, 821, 77, 62, 81, 259, 510, 204, 60, 735,
           468, 49, 82, 106, 336, 293, 237, 610, 149, 907, 113, 19, 248, 104, 240)
"""Answers of AIME I and II 2025, in the order of the examination."""


def test_all_real_problems(make_config, shared_data):
    dataset = make_config("dataset=aime25", f"dataset.path={shared_data}/aime2025/test.jsonl").dataset
    problems = dataset.problems()
    assert tuple(int(problem.answer) for problem in problems) == ANSWERS
    assert [problem.id for problem in problems] == [f"aime25-{number:02d}" for number in range(30)]
    assert {(problem.level, problem.subject, problem.solution) for problem in problems} == {(None, None, None)}
    assert dataset.fingerprint() == "c1289ecc6cc504a1e09f31abc06b3318"


def test_rows_are_numbered(make_config, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"problem": q, "answer": "007"}) + "\n" for q in "pq"))
    config = make_config("dataset=aime25", f"dataset.path={tmp_path}/rows.jsonl", "dataset.check_rows=false")
    problems = config.dataset.problems()
    assert [tuple(problem[:3]) for problem in problems] == [("aime25-00", "p", "007"), ("aime25-01", "q", "007")]
