"""`dataset=clbench` from a file: the questions are conversations, and answers are not graded."""

import json

import pytest

from dflash_mcmc.chains.build import first_prompt
from dflash_mcmc.config.identity import identity_of
from tests.refusals import refused

PROBED = ("probe=deep_readout", "probe.answers=greedy", "draft=tiny", "dataset=clbench")


def row(task: str, *turns: tuple[str, str], category: str = "Rules") -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns], "rubrics": ["r"],
            "metadata": {"task_id": task, "context_id": "c", "context_category": category, "sub_category": "s"}}


@pytest.fixture
def tasks(make_config, tmp_path):
    """A function that returns the problems of rows: tasks(row, ...)."""
    def read(*rows: dict, limit: str = "null"):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return make_config(*PROBED, f"dataset.path={file}", f"dataset.limit={limit}")

    return read


def test_a_question_is_the_conversation_up_to_the_last_turn_of_the_user(tasks):
    config = tasks(row("a", ("system", "Be brief."), ("user", "Why?\nTell.")), row("b", ("user", "Who?"), category="Facts"),
                   row("c", ("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V"), ("assistant", "left out")))
    found = config.dataset.problems()
    assert [problem.id for problem in found] == ["a", "b", "c"]
    assert [problem.question for problem in found] == ["Why?\nTell.", "Who?", "V"]
    assert [[turn["role"] for turn in problem.messages] for problem in found] == [
        ["system", "user"], ["user"], ["system", "user", "assistant", "user"]]
    assert first_prompt(config).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?\nTell.<|im_end|>\n")
    asked = config.dataset.prompting()
    assert [asked.conversation(problem).as_text() for problem in found] == [
        "Be brief.\n\nWhy?\nTell.", "Who?", "system: S\n\nuser: U\n\nassistant: A\n\nuser: V"]
    assert [problem.subject for problem in found] == ["Rules", "Facts", "Rules"]
    assert {(problem.answer, problem.solution) for problem in found} == {("", None)}


def test_the_fingerprint_covers_all_tasks_at_any_limit(tasks):
    rows = [row(name, ("user", name)) for name in "ab"]
    all_of_them, one = tasks(*rows), tasks(*rows, limit="1")
    assert (len(all_of_them.dataset.problems()), len(one.dataset.problems())) == (2, 1)
    before = identity_of(all_of_them)
    assert before == identity_of(one)
    assert identity_of(tasks(row("a", ("user", "other")), rows[1])) != before


def test_it_is_not_graded_and_has_no_gold_solutions(make_config, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row("a", ("user", "u"))))
    with refused("dataset: given 'clbench'", "probe=none", "need a judge model"):
        make_config("dataset=clbench", "dataset.path=x")
    with refused("probe.answers: given 'gold'", "'greedy'", "dataset=clbench"):
        make_config(*PROBED, "probe.answers=gold", f"dataset.path={tmp_path}/rows.jsonl")


@pytest.mark.parametrize("wrong", [
    row("a", ("system", "s")), row("a"), row("a", ("user", None)), {**row("a", ("user", "u")), "messages": "text"},
], ids=["no user", "no turns", "no text", "no list"])
def test_a_row_without_a_conversation_is_refused(tasks, wrong):
    with refused("row 0 has no conversation"):
        tasks(wrong).dataset.problems()


def test_all_sample_tasks(make_config, shared_data):
    file = shared_data / "clbench_sample" / "sample.jsonl"
    problems = make_config(*PROBED, f"dataset.path={file}").dataset.problems()
    assert len(problems) == 12
    assert all(20_000 < sum(len(turn["content"]) for turn in problem.messages) < 170_000 for problem in problems)
    assert sum(len(problem.messages) > 2 for problem in problems) == 5
