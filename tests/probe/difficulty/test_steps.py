"""Equations are checked exactly, and only if their text is unambiguous; tokens are found by their characters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dflash_mcmc.probe.difficulty.steps import AnswerStep, ends, inside, steps

TINY = Path(__file__).resolve().parents[3] / "dflash_mcmc" / "assets" / "tiny"
RIGHT = ("7*24=140+28=168", "2 + 3 = 5", "(2+3)*4=20", "12-5-3=4", "100/5/2=10", "2+3*4=14", "1,200+300=1,500", "1/2=0.5",
         "5*(-3)=-15", "3 \\times 4 = 12", "12 \\div 4 = 3", "2 x 3 = 6", "3 × 4 = 12", "9 ÷ 3 = 3", "7 − 2 = 5", ".05*40=2",
         "0.1+0.2=0.3", "1/3+1/6=1/2")
WRONG = ("7*24=140+28=158", "7*24=141+28=168", "2 + 3 = 6", "10/3=3.33", "1,200+300=15,00", "2-3-4=3",
         "99999*99999=9999700001")
LEFT_ALONE = ("2x+3=7", "2x-3=7", "x = 3+4 = 7", "x - 3 + 4 = 7", "y - 3 + 4 = 7", "2^3+1=9", "3+4=7^2", "10/0=5", "5=5",
              "3+4=", "$5 + $3 = $8", "20% * 50 = 10", "f(3)+4=7", "3 + 4 = 7 + y", "\\frac{1}{2}+3=4",
              "0 + 1 = 1.\\overline{3}", "3+4==7", "1,2345+1=3", "1+1=1234567890123456",
              "+".join(["1"] * 40) + "=40", "3(2+1)=9", "3+4=7x", "a3+4=7")


@pytest.mark.parametrize("text", RIGHT + WRONG)
@pytest.mark.parametrize("form", ["{}", "First {}. Then", "so \\({}\\).", "- {}\n- next", "(since {})", "is <<{}>>0", "[{}];"])
def test_equations_are_found_and_judged(text, form):
    whole = form.format(text)
    (found,) = steps(whole)
    if text == "1,200+300=15,00":  # not a thousands separator: the number ends at the comma
        assert found.text == "1,200+300=15"
    else:
        assert (found.text, whole[found.start : found.stop]) == (text, text)
    assert found.wrong == (text in WRONG)


@pytest.mark.parametrize("text", LEFT_ALONE)
def test_text_that_is_not_plain_arithmetic_is_skipped(text):
    assert steps(text) == []


def test_a_sign_after_a_word_may_be_an_operator():
    assert [step.text for text in ("-3+5=2", "thus: -3+5=2", "(-3+5=2)") for step in steps(text)] == ["-3+5=2"] * 3
    assert steps("total -3+5=2") == []


def test_all_equations_of_a_text_in_order():
    text = "First 7*24=140+28=168. Then 47+168=216.\nThe answer is \\boxed{216}."
    assert [(step.text, step.wrong) for step in steps(text)] == [("7*24=140+28=168", False), ("47+168=216", True)]


@settings(deadline=None)
@given(some.lists(some.integers(0, 999), min_size=2, max_size=5), some.data())
def test_equations_are_evaluated_as_by_python(numbers, data):
    signs = data.draw(some.lists(some.sampled_from("+-*"), min_size=len(numbers) - 1, max_size=len(numbers) - 1))
    side = "".join(f"{number}{sign}" for number, sign in zip(numbers, [*signs, ""], strict=True))
    value = eval(side)  # the text that this test generated
    off = data.draw(some.integers(-2, 2))
    (found,) = steps(f"so {side}={value + off}.")
    assert found.wrong == (off != 0)


@settings(deadline=None)
@given(some.text(alphabet="0123456789+-*/x=(). ,\\n$^a", max_size=60))
def test_no_text_breaks_it(text):
    for step in steps(text):
        assert text[step.start : step.stop] == step.text
        assert "=" in step.text


def test_long_texts_are_parsed_and_long_equations_skipped():
    assert steps("(" * 5000 + "1+1=2" + ")" * 5000) == []
    assert len(steps("1+1=2. " * 5000)) == 5000


def test_the_solutions_of_real_datasets_hold(shared_data):
    """Their authors did the sums, so an equation found wrong would be a parsing error."""
    for name, field, least in (("gsm8k/test.jsonl", "answer", 4000), ("math500/test.jsonl", "solution", 80)):
        found = [step for line in (shared_data / name).read_text().splitlines() for step in steps(json.loads(line)[field])]
        assert len(found) >= least
        assert not [step.text for step in found if step.wrong]


def test_tokens_are_found_by_their_characters():
    text = "So 7*24=168."
    pieces = ["So", " ", "7", "*", "24", "=1", "6", "8.", ""]
    found = ends(lambda tokens: "".join(pieces[token] for token in tokens), np.arange(len(pieces)))
    assert found == [2, 3, 4, 5, 7, 9, 10, 12, 12]
    marked = ["▁So", "▁", *pieces[2:]]  # as SentencePiece does: a space at the start of the decoded text is dropped
    assert ends(lambda tokens: "".join(marked[token] for token in tokens).replace("▁", " ").removeprefix(" "),
                np.arange(len(pieces))) == found
    (step,) = steps(text)
    assert (step.start, step.stop) == (3, 11)
    assert inside(step, found) == range(2, 8)
    assert inside(AnswerStep("", 0, 1, False), found) == range(0, 1)


@pytest.mark.parametrize("text", ["Da 3×4=12 é 😀 日本 5÷5=1.", "First 7*24=168. Then  8+9=17\n\\boxed{17}"])
@pytest.mark.parametrize("name", ["tiny", "qwen3"])
def test_with_tokenizers_that_split_characters(text, name, request):
    from transformers import AutoTokenizer

    folder = TINY if name == "tiny" else request.getfixturevalue("shared_data") / "qwen3_tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(tokens: np.ndarray) -> str:
        return tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    found = ends(decode, tokens)
    assert found == sorted(found)
    assert found[-1] == len(text)
    for number, end in enumerate(found):  # by definition: decode all tokens so far, without unfinished characters
        assert decode(tokens[: number + 1]).rstrip("\ufffd") == text[:end]
    for step in steps(text):
        written = decode(tokens[np.array(inside(step, found))])
        assert step.text in written
        assert len(written) <= len(step.text) + 2
