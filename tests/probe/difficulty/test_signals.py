"""Signals compared with float64 loops and numbers by hand; each place has its own distributions, whatever the pieces."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.forcing import sequences
from dflash_mcmc.probe.difficulty import signals
from dflash_mcmc.probe.difficulty.steps import AnswerStep, ends, inside, steps
from tests.train.drafts import BLOCK_SIZE, block_alone, random_draft, random_target

TOKENS = np.random.default_rng(3).integers(0, 58, 33)
PROMPT_LENGTH = 7
NAMES = {*signals.DRAFT, *signals.TARGET}


def by_loops(target: np.ndarray, draft: np.ndarray, token: int) -> dict[str, float]:
    """The signals of one token from float64 logits (vocabulary,), by definition."""
    p, q = (np.exp(logits - logits.max()) for logits in (target, draft))
    p, q = p / p.sum(), q / q.sum()
    pairs = [(float(a), float(b)) for a, b in zip(p, q, strict=True) if a > 0 or b > 0]
    return {
        "kl_target_draft": sum(a * math.log(a / b) for a, b in pairs),
        "kl_draft_target": sum(b * math.log(b / a) for a, b in pairs),
        "total_variation": sum(abs(a - b) for a, b in pairs) / 2,
        "minus_log_acceptance": -math.log(sum(min(a, b) for a, b in pairs)),
        "draft_entropy": -sum(b * math.log(b) for _, b in pairs),
        "draft_surprisal": -math.log(q[token]),
        "top1_disagreement": float(p.argmax() != q.argmax()),
        "target_entropy": -sum(a * math.log(a) for a, _ in pairs),
        "target_surprisal": -math.log(p[token]),
        "least_confidence": 1 - max(a for a, _ in pairs),
    }


def test_by_hand():
    p, q = torch.tensor([[0.8, 0.15, 0.05, 0.0]]), torch.tensor([[0.5, 0.3, 0.2, 0.0]])  # the fourth id has no token
    found = {name: float(values[0]) for name, values in signals.of_tokens(p.log(), q.log(), torch.tensor([1])).items()}
    assert set(found) == NAMES
    assert found["total_variation"] == pytest.approx(0.30, abs=1e-6)  # the document's example, section 4.1
    assert found["minus_log_acceptance"] == pytest.approx(-math.log(0.70), abs=1e-6)
    assert found["kl_target_draft"] == pytest.approx(0.8 * math.log(1.6) - 0.15 * math.log(2) - 0.05 * math.log(4), abs=1e-6)
    assert found["draft_surprisal"] == pytest.approx(-math.log(0.3), abs=1e-6)
    assert found["target_surprisal"] == pytest.approx(-math.log(0.15), abs=1e-6)
    assert found["least_confidence"] == pytest.approx(0.2, abs=1e-6)
    assert found["top1_disagreement"] == 0.0


def test_equal_distributions_do_not_disagree():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    found = signals.of_tokens(logits, logits + 3.0, torch.arange(5))
    for name in ("kl_target_draft", "kl_draft_target", "total_variation", "minus_log_acceptance", "top1_disagreement"):
        assert float(found[name].abs().max()) < 1e-6
    assert torch.allclose(found["draft_entropy"], found["target_entropy"], atol=1e-5)


@pytest.mark.parametrize("block_size", [BLOCK_SIZE, 3])
def test_signals_along_an_answer_equal_those_of_single_blocks(block_size):
    model = random_target()
    draft = random_draft(model)
    found = signals.along(model, DFlashDrafter(draft, model, block_size), TOKENS[:PROMPT_LENGTH], TOKENS[PROMPT_LENGTH:])
    anchors = range(PROMPT_LENGTH, len(TOKENS) - block_size + 1, block_size)
    assert found.places.tolist() == [anchor + slot - PROMPT_LENGTH for anchor in anchors for slot in range(1, block_size)]
    with torch.no_grad():
        target = model.logits(model.decoder(input_ids=torch.from_numpy(TOKENS)[None]).last_hidden_state[0])
        for number, place in enumerate(found.places):
            position = place + PROMPT_LENGTH
            anchor = PROMPT_LENGTH + place // block_size * block_size
            alone = shorter(draft, block_size, model, anchor)[position - anchor - 1]
            expected = by_loops(target[position - 1].double().numpy(), alone.double().numpy(), int(TOKENS[position]))
            assert {name: values[number] for name, values in found.values.items()} == pytest.approx(expected, abs=2e-4)


def shorter(draft, block_size, model, anchor):
    """Logits of a block of this size, drafted alone."""
    whole = draft.shape
    draft.shape = replace(whole, block_size=block_size)
    try:
        return block_alone(draft, model, torch.from_numpy(TOKENS), anchor)
    finally:
        draft.shape = whole


def test_pieces_change_nothing(monkeypatch):
    model = random_target()
    drafter = DFlashDrafter(random_draft(model), model, BLOCK_SIZE)
    whole = signals.along(model, drafter, TOKENS[:7], TOKENS[7:])
    monkeypatch.setattr(sequences, "_LOGITS_BYTES", 3 * 4 * model.vocab_size)
    widest, plain = [], signals.of_tokens
    monkeypatch.setattr(signals, "of_tokens", lambda *tensors: widest.append(len(tensors[0])) or plain(*tensors))
    pieces = signals.along(model, drafter, TOKENS[:7], TOKENS[7:])
    assert max(widest) == 3
    for name in NAMES:
        np.testing.assert_allclose(pieces.values[name], whole.values[name], atol=1e-5)


def test_signals_of_a_range_of_tokens():
    values = {"target_entropy": np.array([0.5, 2.0, 0.25, 1.0 / 3.0])}
    found = signals.Signals(np.array([1, 2, 3, 5]), values)
    assert found.mean() == {"target_entropy": pytest.approx(0.770833)}
    some = found.of(range(2, 5))
    assert some.places.tolist() == [2, 3]
    assert (some.mean(), some.max()) == ({"target_entropy": 1.125}, {"target_entropy": 2.0})
    assert found.of(range(5, 6)).max() == {"target_entropy": 0.333333}
    assert not len(found.of(range(4, 5)).places)


# Equations are checked exactly, and only if their text is unambiguous; tokens are found by their characters.

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
