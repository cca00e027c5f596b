"""Templates of dataset.prompt: their texts, the identity of a run with a template, and the first prompt that is shown."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from dflash_mcmc.config.identity import identity_hash, identity_of, plain
from dflash_mcmc.dataset.inputs.prompting import TEMPLATES, resolve
from dflash_mcmc.engine.batching import prompt_encoder
from dflash_mcmc.runner.build import first_prompt, prompts
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
    "program": "You will be given a question (problem specification) and will generate a correct Python program that matches "
               "the specification and passes all tests.\n\n{question}",
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


def test_every_template_has_another_identity(make_config):
    assert len({identity_hash(make_config(f"dataset.prompt={name}")) for name in TEXTS}) == len(TEXTS)


@pytest.mark.parametrize(("dataset", "name"), [("math500", "document"), ("gsm8k", "document"), ("aime24", "boxed"),
                                               ("aime25", "boxed"), ("arith", "plain")])
def test_default_templates_of_the_datasets(make_config, dataset, name):
    assert make_config(f"dataset={dataset}").dataset.prompt == TEXTS[name]


@pytest.mark.parametrize(("given", "message"), [
    ("documnet", "did you mean 'document'"), ("'Solve {problem}.'", "{question} in it"),
    ("''", "one of document, paper, boxed, plain, code, mbpp, choice, program")])
def test_an_unknown_template_is_an_error_of_one_line(make_config, given, message):
    with refused(message, start="dataset.prompt: given "):
        make_config(f"dataset.prompt={given}")


def test_a_custom_text_is_not_changed():
    assert resolve("{x} {question}\\{") == "{x} {question}\\{"


def test_first_prompt_in_chat(make_config):
    """The embedded tokenizer has the chat template of Qwen3."""
    config = make_config("dataset.prompt=paper", "dataset.limit=3", "dataset.ids=[arith-007,arith-002]")
    question = config.dataset.problems()[0].question
    assert config.dataset.problems()[0].id == "arith-002"
    assert first_prompt(config) == ("<|im_start|>user\n" + TEXTS["paper"].replace("{question}", question)
                                    + "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_first_prompt_equals_the_prompt_of_the_run(make_config):
    for override in ("model.chat=true", "model.chat=false", "model.enable_thinking=true"):
        config = make_config("dataset.limit=1", "dataset.prompt=boxed", override)
        model = config.model.load("cpu")
        [tokens] = prompts(config, model, config.dataset.problems()).values()
        assert model.tokenizer.decode(tokens) == first_prompt(config)


def test_first_prompt_as_bare_text(make_config):
    config = make_config("model.chat=false", "dataset.limit=1", "dataset.prompt='Q: {question}'")
    assert first_prompt(config) == "Q: " + config.dataset.problems()[0].question


def test_first_prompt_shows_the_special_tokens_of_bare_text(make_config, tmp_path):
    """A special token that the tokenizer adds before every text is part of the shown prompt."""
    folder = tokenizer_only(make_config, tmp_path)
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


def test_first_prompt_loads_no_model(make_config, tmp_path):
    """The prompt is shown for a checkpoint without weights."""
    folder = tokenizer_only(make_config, tmp_path)
    assert not list(folder.glob("*.safetensors"))
    assert first_prompt(make_config(f"model.path={folder}", "dataset.limit=1")) == first_prompt(make_config("dataset.limit=1"))


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


def tokenizer_only(make_config, folder: Path) -> Path:
    """The embedded model's checkpoint without its weights."""
    made = folder / "tokenizer_only"
    shutil.copytree(make_config().model.path, made, ignore=shutil.ignore_patterns("*.safetensors"))
    return made


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
    assert prompt_encoder.encode(Gapped(), text, add, 64, 10).tolist() == ids
    assert prompt_encoder.id_bound(Gapped()) == 10
