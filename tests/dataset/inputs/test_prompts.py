"""Templates of dataset.prompt: their texts, the identity of a run with a template, and the first prompt that is shown."""

import json
import re
import shutil

import pytest

from dflash_mcmc import tokenizer
from dflash_mcmc.chains.build import first_prompt, prompts
from dflash_mcmc.config.identity import identity_hash, identity_of, plain
from dflash_mcmc.dataset.inputs.conversations import TEMPLATES, Conversation, messages_of, tools_of
from tests.refusals import refused

TEXTS = {
    "document": r"Can you solve the following math problem? {question} Please reason step by step, and put your final answer "
                r"within \boxed{}.",
    "paper": r"Can you solve the following math problem? {question} Please reason step by step, and put your final answer "
             r"within \boxed{{}}.",
    "boxed": "{question}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "plain": "{question}",
    "code": "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
            "```python\n{question}\n```",
    "mbpp": "You are an expert Python programmer, and here is your task: {question}",
    "choice": "Answer the following multiple choice question. The last line of your response should be of the following "
              "format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n"
              "\n{question}",
}


def test_texts():
    """The texts are those that the authors send: the paper's code keeps doubled braces, the document's code formats them."""
    assert {name: template.text for name, template in TEMPLATES.items()} == TEXTS
    assert all(template.source for template in TEMPLATES.values())


@pytest.mark.parametrize("name", TEXTS)
def test_a_name_and_its_text_have_the_same_identity(make_config, name):
    named, spelt = make_config(f"dataset.prompt={name}"), make_config(f'dataset.prompt="{TEXTS[name]}"')
    assert named.dataset.prompt == spelt.dataset.prompt == TEXTS[name]
    assert identity_hash(named) == identity_hash(spelt)
    assert identity_of(named)["dataset.prompt"] == plain(named)["dataset"]["prompt"] == TEXTS[name]


@pytest.mark.parametrize(("dataset", "name"), [("math500", "document"), ("gsm8k", "document"), ("aime24", "boxed"),
                                               ("aime25", "boxed"), ("arith", "plain")])
def test_default_templates_of_the_datasets(make_config, dataset, name):
    assert make_config(f"dataset={dataset}").dataset.prompt == TEXTS[name]


@pytest.mark.parametrize(("given", "message"), [
    ("documnet", "did you mean 'document'"), ("'Solve {problem}.'", "{question} in it"),
    ("''", "one of document, paper, boxed, plain, code, mbpp, choice")])
def test_an_unknown_template_is_an_error_of_one_line(make_config, given, message):
    with refused(message, start="dataset.prompt: given "):
        make_config(f"dataset.prompt={given}")


def test_first_prompt_equals_the_prompt_of_the_run(make_config):
    for override in ("model.chat=true", "model.chat=false", "model.enable_thinking=true"):
        config = make_config("dataset.limit=1", "dataset.prompt=boxed", override)
        model = config.model.load("cpu")
        [tokens] = prompts(config, model, config.dataset.problems()).values()
        assert model.tokenizer.decode(tokens) == first_prompt(config)


def test_first_prompt_shows_the_special_tokens_of_bare_text(make_config, tmp_path):
    """A special token that the tokenizer adds before every text is part of the shown prompt, which needs no weights."""
    folder = shutil.copytree(make_config().model.path, tmp_path / "one", ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    [token] = [entry["id"] for entry in tokenizer["added_tokens"] if entry["content"] == "<|endoftext|>"]
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {
        "<|endoftext|>": {"id": "<|endoftext|>", "ids": [token], "tokens": ["<|endoftext|>"]}}}
    path.write_text(json.dumps(tokenizer))
    bare = make_config(f"model.path={folder}", "model.chat=false", "dataset.limit=1")
    question = bare.dataset.problems()[0].question
    assert first_prompt(bare) == "<|endoftext|>" + question
    assert first_prompt(make_config(f"model.path={folder}", "dataset.limit=1")).startswith("<|im_start|>user\n" + question)


def test_first_prompt_of_math500_with_the_tokenizer_of_qwen3(make_config, shared_data, tmp_path):
    folder = tmp_path / "qwen3"
    shutil.copytree(shared_data / "qwen3_tokenizer", folder)
    shutil.copy(shared_data / "model_configs" / "Qwen3-4B" / "config.json", folder)
    config = make_config("model=qwen3_4b", f"model.path={folder}", "dataset=math500",
                         f"dataset.path={shared_data}/math500/test.jsonl")
    assert first_prompt(config) == (
        "<|im_start|>user\nCan you solve the following math problem? Convert the point $(0,3)$ in rectangular coordinates to "
        "polar coordinates.  Enter your answer in the form $(r,\\theta),$ where $r > 0$ and $0 \\le \\theta < 2 \\pi.$ Please "
        "reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(("overrides", "message"), [
    (("probe=rejection_sampling",), "probe: given 'rejection_sampling'; allowed: with show=prompt: none"),
    (("dataset=jsonl", "dataset.path=/no/such/file.jsonl"), "dataset.path: given '/no/such/file.jsonl'; allowed: a JSON"),
    (("model.path=nobody/nothing",), "model.path: given 'nobody/nothing', which is no folder here"),
], ids=["no dataset", "no file", "no tokenizer"])
def test_a_missing_prompt_is_an_error_of_one_line(make_config, overrides, message):
    with refused(start=message):
        first_prompt(make_config(*overrides))


@pytest.mark.slow
def test_the_whole_prompt_is_shown_and_nothing_is_written(command, tmp_path):
    done = command("dflash_mcmc", "show=prompt", "dataset.prompt=boxed")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == "<|im_start|>user"
    assert "\\boxed{}" in done.stdout
    assert "<|im_start|>assistant" in rest
    assert list(tmp_path.iterdir()) == []
    refused = command("dflash_mcmc", "show=prompts")
    assert refused.stderr.startswith("error: show: given 'prompts'; allowed: one of 'prompt' or null")


class Gapped:
    """A tokenizer with a gap: three tokens, ids up to 9. It adds bos to every text."""

    bos_token_id = 9

    def get_vocab(self):
        return {"a": 0, "b": 1, "<s>": 9}

    def __len__(self):
        return 3

    def __call__(self, text, add_special_tokens=True, split_special_tokens=False):
        ids = [self.get_vocab()[part] for part in re.findall("<s>|.", text)]
        return {"input_ids": [9] * add_special_tokens + ids}


@pytest.mark.parametrize(("text", "add", "ids"), [
    ("ab", True, [9, 0, 1]), ("<s>ab", True, [9, 0, 1]), ("<s>ab", False, [9, 0, 1]), ("ab", False, [0, 1]),
    ("<s><s>a", True, [9, 9, 0]), ("a<s>", True, [9, 0, 9])])
def test_bos_stands_once_at_the_beginning_and_ids_may_have_gaps(text, add, ids):
    assert tokenizer.encode(Gapped(), text, add, 64, 10).tolist() == ids
    assert tokenizer.id_bound(Gapped()) == 10


# What a model is asked: system prompt, few-shot examples, conversations and tools, with a chat template and without one.

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


def test_the_identity_covers_what_is_asked(made, tmp_path):
    plain = identity_of(made())
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


HUB = ("dataset=hub", "dataset.path=a/b", "dataset.question_field=q", "dataset.answer_field=a")


@pytest.mark.parametrize(("overrides", "message"), [
    (["dataset=jsonl", "dataset.path=x", "dataset.fewshot_path=x"],
     "fewshot_path: given 'x'; allowed: null with dataset.fewshot=0"),
    ([*HUB, "dataset.fewshot_split=train"], "fewshot_split: given 'train'; allowed: null with dataset.fewshot=0"),
    ([*HUB, "dataset.fewshot=1", "dataset.fewshot_split=train", "dataset.fewshot_path=x.jsonl"],
     "fewshot_split: given 'train'; allowed: null with dataset.fewshot_path"),
    (["dataset.fewshot=1", "dataset.fewshot_path=x"], "fewshot_path: given 'x'; allowed: null")])  # a generated dataset
def test_examples_that_are_not_shown_are_refused(make_config, overrides, message):
    with refused(f"dataset.{message}"):
        make_config(*overrides).dataset.prompting()


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


@pytest.mark.slow
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


def test_values_that_are_no_tools_are_refused():
    for wrong in ("{", 3, [1], {"a": 1}, ["\ud800"], "[" * 100_000, "[" * 700 + "]" * 700):
        with refused("row 0 has", "for its tools"):
            tools_of(wrong, "row 0")
    assert tools_of(None, "row 0") == tools_of("", "row 0") == tools_of([], "row 0") == ()
