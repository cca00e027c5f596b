"""`dataset=math500` from a file: real rows where they are at hand, made-up ones for the errors."""

from __future__ import annotations

import json

import pytest

from dflash_mcmc.errors import UserError

ROWS = [{"problem": "What is $1+1$?", "answer": "2", "level": 1, "subject": "Algebra", "unique_id": "a/1.json",
         "solution": ""},
        {"problem": "What is $\\{1\\}$?", "answer": "\\{1\\}", "level": 5, "subject": "Sets", "unique_id": "b/2.json",
         "solution": ""}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"dataset.path={path}"


def test_reads_a_file(make_config, tmp_path):
    dataset = make_config("dataset=math500", write(tmp_path / "rows.jsonl", ROWS)).dataset
    first, second = dataset.problems()
    assert first == ("a/1.json", "What is $1+1$?", "2", 1, "Algebra")
    assert second.answer == "\\{1\\}"
    limited = make_config("dataset=math500", f"dataset.path={tmp_path}/rows.jsonl", "dataset.limit=1").dataset
    assert limited.problems() == [first]


def test_content_is_the_fingerprint(make_config, tmp_path):
    one = make_config("dataset=math500", write(tmp_path / "one.jsonl", ROWS)).dataset.fingerprint()
    same = make_config("dataset=math500", write(tmp_path / "same.jsonl", ROWS)).dataset.fingerprint()
    other = make_config("dataset=math500", write(tmp_path / "other.jsonl", ROWS[:1])).dataset.fingerprint()
    assert one == same != other


@pytest.mark.parametrize(("content", "message"), [
    (None, "a JSON Lines file that exists"),
    ("", "cannot load"),
    ("not json\n", "cannot load"),
    ('{"question": "x"}\n', "lacks the field 'problem'; it has: question"),
])
def test_bad_files_are_one_line(make_config, tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        make_config("dataset=math500", f"dataset.path={path}").dataset.problems()
    assert "\n" not in str(caught.value)


def test_without_network_and_cache_is_one_line(make_config, tmp_path, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UserError, match="hub cannot be reached; allowed: a file, dataset"):
        make_config("dataset=math500").dataset.problems()


def test_all_real_problems(make_config, shared_data):
    problems = make_config("dataset=math500", f"dataset.path={shared_data}/math500/test.jsonl").dataset.problems()
    assert len(problems) == 500
    assert len({p.id for p in problems}) == 500
    levels = [sum(p.level == level for p in problems) for level in range(1, 6)]
    assert levels == [43, 90, 105, 128, 134]
