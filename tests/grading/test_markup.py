"""Marks of thinking and fences of programs: thinking never counts, and fences are read as CommonMark has them."""

import json
import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_mcmc.grading.choice import final_letter
from dflash_mcmc.grading.code.programs import program_of, task_of
from dflash_mcmc.grading.extraction import THINKING, Extraction, continued
from dflash_mcmc.tokenizer import continuation, texts_of

F = "`" * 3
TASK = task_of(json.dumps({"test_list": ["assert plus(1, 2) == 3"]}))
PLUS = "def plus(a, b):\n    return a + b\n"
FENCED = {
    "CRLF": f"{F}python\n{PLUS}{F}\n".replace("\n", "\r\n"),
    "info string": f'{F}python title="a.py"\n{PLUS}{F}',
    "four backticks": f"{F}`python\n{PLUS}{F}`",
    "a fence in a fence": f"{F}`markdown\n{F}python\n{PLUS}{F}\n{F}`",
    "a fence in a docstring": f'{F}python\ndef plus(a, b):\n    """\n'
                              f'    {F}\n    plus(1, 2)\n    {F}\n    """\n    return a + b\n{F}',
}


@pytest.mark.parametrize("text", FENCED.values(), ids=FENCED)
def test_programs_in_fences(text):
    space: dict = {}
    exec(program_of(text, TASK) or "", space)
    assert space["plus"](1, 2) == 3


@pytest.mark.parametrize(("begin", "end"), [("<plan>", "</plan>"), ("[PLAN]", "[/PLAN]"), ("### Thought", "### Reply")])
def test_own_marks_of_thinking(begin, end):
    def found(prompt, text):
        return Extraction().find(continued(prompt, text, [begin, end]))

    cut = f"{begin}Try \\boxed{{12}}."
    assert found("Q", cut).rule == found(f"Q {begin}\n", "Try \\boxed{12}.").rule == "unfinished_thinking"
    assert found("Q", f"{cut}{end}So \\boxed{{15}}.").answer == "15"
    assert found("Q", f"{cut}{end}I cannot say.").answer is None
    assert found(f"Q {begin}{end}", "So \\boxed{15}.").answer == "15"
    assert Extraction().find(continued("Q", cut)).answer == "12"


@pytest.mark.parametrize(("begin", "end"), THINKING)
def test_special_tokens_that_mark_thinking_are_in_the_text(begin, end):
    """As in Mistral's, Gemma's and gpt-oss' tokenizers: without them a box in the thinking would be the answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    parts = [part for mark in (begin, end) for part in re.findall(r"<\|[^|]*\|>|<\|\w+>|<\w+\|>|.+", mark)]
    backend.add_special_tokens(["<s>", "<|eot|>", *dict.fromkeys(parts)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eot|>")
    ids = tokenizer(f"{begin}Try \\boxed{{12}}.{end}It is \\boxed{{15}}.<|eot|>")["input_ids"]
    text = continuation(tokenizer, ids)
    assert text == f"{begin}Try \\boxed{{12}}.{end}It is \\boxed{{15}}."
    assert Extraction().find(continuation(tokenizer, ids[:12])).rule == "unfinished_thinking"
    assert texts_of(tokenizer, len(tokenizer)).joined(ids).decode() == text


@pytest.mark.parametrize(("begin", "end"), THINKING)
def test_marks_of_thinking(begin, end):
    unfinished = begin + "Try \\boxed{12}. The answer is B. "
    assert Extraction().find(unfinished).rule == "unfinished_thinking"
    assert Extraction().find(unfinished + end + "So \\boxed{15}.").answer == "15"
    assert Extraction().find(unfinished + end + "I cannot say.").answer is None
    assert final_letter(unfinished, "ABCD") == (None, "unfinished_thinking")
    assert final_letter(f"{unfinished}{end}Answer: C", "ABCD")[0] == "C"
    assert program_of(f"{begin}{F}python\n{PLUS}{F}", TASK) is None
    assert continued(f"Question? {begin}\n", "hm") == begin + "hm"
    assert continued(f"{begin} Question?", "hm") == "hm"
