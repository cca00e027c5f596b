"""What a model is asked: system prompt, few-shot examples, conversations and tools, with a chat template and without one."""

from __future__ import annotations

import copy
import json

import pytest

from dflash_mcmc.config.identity import identity_hash, identity_of
from dflash_mcmc.dataset.inputs.conversations import Conversation, messages_of, tools_of
from dflash_mcmc.runner.build import first_prompt
from tests.refusals import refused

ROWS = [{"question": f"Is {n} even?", "answer": "yes" if n % 2 == 0 else "no"} for n in range(6)]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


@pytest.fixture
def made(make_config, tmp_path):
    """A function from overrides to the configuration for a file of ROWS; another file has other rows."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "shots.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"question": "Is 9 odd?", "answer": "yes"}))
    return lambda *overrides: make_config("dataset=jsonl", f"dataset.path={tmp_path}/rows.jsonl", "dataset.prompt=plain",
                                          *overrides)


def test_examples_are_the_same_for_all_problems_and_never_the_problem_itself(made):
    dataset = made("dataset.fewshot=3").dataset
    asked = {problem.question: dataset.prompting().conversation(problem).examples for problem in dataset.problems()}
    golds = {row["question"]: row["answer"] for row in ROWS}
    for question, examples in asked.items():
        assert len(dict(examples)) == 3
        assert question not in dict(examples)
        assert all(golds[shown] == answer for shown, answer in examples)
    uses = [sum(shown in dict(examples) for examples in asked.values()) for shown in asked]
    assert sorted(uses) == [0, 0, 3, 5, 5, 5]  # three examples, and a fourth for these three themselves
    other = made("dataset.fewshot=3", "dataset.fewshot_seed=5")
    assert [other.dataset.prompting().conversation(problem).examples for problem in dataset.problems()] != list(asked.values())
    assert len(made("dataset.fewshot=3", "dataset.limit=1").dataset.prompting().examples) == 6


def test_a_base_model_reads_examples_as_text_and_a_chat_model_as_turns(made, tmp_path):
    asked = ("dataset.system=Be brief.", "dataset.fewshot=1", f"dataset.fewshot_path={tmp_path}/shots.jsonl",
             "dataset.prompt=Q: {question} A:", "dataset.ids=['00000']")
    assert first_prompt(made(*asked, "model.chat=false")) == "Be brief.\n\nQ: Is 9 odd? A: yes\n\nQ: Is 0 even? A:"
    assert first_prompt(made(*asked)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQ: Is 9 odd? A:<|im_end|>\n<|im_start|>assistant\nyes"
        "<|im_end|>\n<|im_start|>user\nQ: Is 0 even? A:<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_identity_covers_what_is_asked_and_is_unchanged_without_it(made, tmp_path):
    plain = identity_of(made())
    assert not {"dataset.system", "dataset.fewshot", "dataset.fewshot_seed"} & set(plain)
    assert identity_of(made("dataset.fewshot_seed=3")) == plain  # without examples the seed has no effect
    given = [(), ("dataset.system=S",), ("dataset.fewshot=1",), ("dataset.fewshot=1", "dataset.fewshot_seed=3"),
             ("dataset.fewshot=1", f"dataset.fewshot_path={tmp_path}/shots.jsonl")]
    assert len({identity_hash(made(*overrides)) for overrides in given}) == len(given)


def test_a_prompt_file_counts_by_its_content(made, tmp_path):
    (tmp_path / "a.txt").write_text("Now: {question}\n")
    (tmp_path / "b.txt").write_text("Now: {question}")
    assert first_prompt(made(f"dataset.prompt_file={tmp_path}/a.txt", "model.chat=false")) == "Now: Is 0 even?"
    written = identity_hash(made("dataset.prompt=Now: {question}"))
    assert {identity_hash(made(f"dataset.prompt_file={tmp_path}/{name}.txt")) for name in "ab"} == {written}
    (tmp_path / "c.txt").write_text("Now")
    with refused("allowed: a file with {question} in its text", start="dataset.prompt_file: given "):
        made(f"dataset.prompt_file={tmp_path}/c.txt")
    with refused("a text file that can be read (No such file", start="dataset.prompt_file: given "):
        made(f"dataset.prompt_file={tmp_path}/d.txt")


@pytest.mark.parametrize(("overrides", "message"), [
    (["dataset.fewshot=6"], "dataset.fewshot: given 6; allowed: at most 5, the other problems"),
    (["dataset.fewshot=1", "dataset.answer_field=null"], "dataset.fewshot: problem 0"),
    (["dataset.fewshot=1", "dataset.fewshot_path=none.jsonl"], "dataset.fewshot_path: given 'none.jsonl'; allowed: a JSON"),
])
def test_examples_that_cannot_be_shown_are_refused_with_the_identity(made, overrides, message):
    """The identity of a run is computed before its model is loaded."""
    with refused(message):
        made(*overrides).dataset.fingerprint()


def test_a_generated_dataset_has_no_file_of_examples(make_config):
    with refused("dataset.fewshot_path: given 'x'; allowed: null"):
        make_config("dataset.fewshot=1", "dataset.fewshot_path=x").dataset.prompting()


def test_a_conversation_keeps_its_turns_and_the_prompt_frames_the_last_question(make_config, tmp_path):
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"},
             {"role": "user", "content": "V"}, {"role": "assistant", "content": "an answer"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"turns": turns}))
    given = ("dataset=jsonl", f"dataset.path={tmp_path}/rows.jsonl", "dataset.messages_field=turns",
             "dataset.answer_field=null", "dataset.prompt=<{question}>")
    config = make_config(*given)
    [problem] = config.dataset.problems()
    assert config.dataset.prompting().conversation(problem).messages() == [*turns[:3], {"role": "user", "content": "<V>"}]
    with refused("dataset.system: given 'T'; allowed: null, since problem 00000 has a system turn of its own"):
        make_config(*given, "dataset.system=T").dataset.fingerprint()


def test_tools_reach_the_template_and_a_template_without_tools_is_refused(make_config, shared_data):
    from transformers import AutoTokenizer

    turns = messages_of([{"role": "user", "content": "Add 1 and 2."}], "row 0")
    asked = Conversation(turns, tools_of(json.dumps(TOOLS), "row 0"), system="Be brief.")
    text = asked.with_template(AutoTokenizer.from_pretrained(shared_data / "qwen3_tokenizer"), enable_thinking=False)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert json.dumps(TOOLS[0]) in text
    tiny = make_config().model
    with refused("1 tools, which the chat template of the tokenizer leaves out"):
        tiny.render(tiny.tokenizer(), asked)
    with refused("model.chat: given False for a conversation with tools"):
        asked.as_text()


def test_a_template_that_refuses_a_role_is_an_error_of_one_line(make_config):
    model = make_config().model
    tokenizer = copy.deepcopy(model.tokenizer())
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    with refused("refuses the conversation of system, user: TemplateError: no system role"):
        model.render(tokenizer, Conversation.of("U")._replace(system="S"))


def test_values_that_are_no_tools_are_refused():
    for wrong in ("{", 3, [1], {"a": 1}, ["\ud800"]):
        with refused("row 0 has", "for its tools"):
            tools_of(wrong, "row 0")
    assert tools_of(None, "row 0") == tools_of("", "row 0") == tools_of([], "row 0") == ()
