"""`--model dflash_mcmc` against lm_eval's own `hf` model: texts, log likelihoods, the commands of the page."""

from __future__ import annotations

import json

import pytest
import torch

from dflash_mcmc.config.schema import PACKAGE
from tests import pages
from tests.conftest import ROOT
from tests.harness.examples import ROWS, TINY, page_commands, shell

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: make harness")
pytestmark = pytest.mark.harness

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from dflash_mcmc.harness.lm_eval.model import DflashMcmcLM  # noqa: E402

GSM8K = [json.loads(line) for line in (PACKAGE / "assets/real/gsm8k.jsonl").read_text().splitlines()[:4]]
SMOLLM2 = ROOT / "outputs/models/smollm2"


@pytest.fixture(autouse=True)
def guard_of_a_test() -> None:
    """Replaces the guard of tests/leaks.py: lm_eval sets variables and random states."""


@pytest.fixture(autouse=True, scope="module")
def guard_of_a_module() -> None:
    """As `guard_of_a_test`."""


@pytest.fixture(scope="module")
def ours() -> DflashMcmcLM:
    return DflashMcmcLM(pretrained=TINY, **{"model.dtype": "float32"})


@pytest.fixture(scope="module")
def theirs(ours) -> HFLM:
    return hf(TINY, ours.max_length)


def hf(folder: str, max_length: int) -> HFLM:
    """lm_eval's model, which gives probability to ids that the tokenizer does not have; these are left out."""
    model = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=4, max_length=max_length)
    known, call = len(model.tokenizer), model._model_call

    def of_known(*given, **named):
        logits = call(*given, **named)
        logits[..., known:] = -torch.inf
        return logits

    model._model_call = of_known
    return model


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, given, 0, ("task", number, 1)) for number, given in enumerate(arguments)]


def chat(model, row: dict) -> str:
    return model.apply_chat_template([{"role": "user", "content": row["question"]}])


@pytest.mark.parametrize("until", [[], ["Then", " ="], ["=", "Answer"]])
def test_greedy_texts_are_those_of_hf(ours, theirs, until):
    kwargs = {"until": until, "do_sample": False, "max_gen_toks": 60}
    asked = [(text, kwargs) for row in ROWS for text in (chat(ours, row), row["question"])]
    assert chat(ours, ROWS[0]) == chat(theirs, ROWS[0])
    found = ours.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert found == theirs.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert sum(map(bool, found[::2])) >= 5
    assert not [text for text in found for string in until if string in text]


@pytest.mark.parametrize("folder", [TINY, pytest.param(str(SMOLLM2), marks=pytest.mark.skipif(
    not SMOLLM2.is_dir(), reason="python -m dflash_mcmc.fetch smollm2 has not been run"))])
def test_greedy_texts_of_gsm8k_are_those_of_hf(folder):
    """Few-shot prompts as in lm_eval's task `gsm8k`, whose answers go on to another question, and chat prompts."""
    ours = DflashMcmcLM(pretrained=folder, **{"model.dtype": "float32"})
    theirs = hf(folder, ours.max_length)
    shots = [f"Question: {row['question']}\nAnswer:" for row in GSM8K]
    before = f"{shots[0]} {GSM8K[0]['answer']}\n\n"
    kwargs = {"until": ["Question:", "</s>", "<|im_end|>"], "do_sample": False, "max_gen_toks": 48}
    asked = [(text, kwargs) for shot, row in zip(shots[1:], GSM8K[1:], strict=True)
             for text in (before + shot, chat(ours, row))]
    found = ours.generate_until(requests("generate_until", asked), disable_tqdm=True)
    expected = theirs.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert [ours.tok_encode(text) for text in found] == [ours.tok_encode(text) for text in expected]
    assert found == expected
    assert sum(map(bool, found)) >= len(found) // 2


def test_requests_of_different_generation_kwargs_share_a_batch(monkeypatch):
    """Their answers are those that each set of generation_kwargs has in a batch of its own."""
    model = DflashMcmcLM(pretrained=TINY, seed=3)
    kinds = [{"until": ["Then", " ="], "max_gen_toks": 40}, {"until": ["="], "max_gen_toks": 40},
             {"until": [], "max_gen_toks": 12}, {"until": ["Then"], "max_gen_toks": 24, "do_sample": True, "temperature": 1.5}]
    asked = requests("generate_until", [(chat(model, row), kind) for row in ROWS[:3] for kind in kinds])
    alone = {}
    for kind in kinds:
        own = [each for each in asked if each.args[1] == kind]
        alone.update(zip((each.doc_id for each in own), model.generate_until(own, disable_tqdm=True), strict=True))
    engine, started = type(model._args.config.engine), []
    start = engine.start
    monkeypatch.setattr(engine, "start", lambda *given: started.append(given) or start(*given))
    assert model.generate_until(asked, disable_tqdm=True) == [alone[each.doc_id] for each in asked]
    assert len(started) == 1
    assert len(set(alone.values())) > len(kinds)


def test_log_likelihoods_are_those_of_hf(ours, theirs):
    answers = ours.generate_until(requests("generate_until", [(chat(ours, row), {"until": []}) for row in ROWS]),
                                  disable_tqdm=True)
    begun = [ours.tokenizer.decode(ours.tok_encode(answer)[:4]) for answer in answers]  # no token spans its end
    asked = [pair for row, answer, first in zip(ROWS, answers, begun, strict=True) for pair in (
        (row["question"], " " + row["answer"]), ("", row["solution"]), (row["question"] + " ", row["solution"]),
        (chat(ours, row), row["solution"]), (chat(ours, row) + first, answer.removeprefix(first)))]
    found = ours.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True)
    expected = theirs.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {True, False}


def test_a_continuation_is_whole_where_a_token_spans_the_join(ours):
    """Whether the token is all of it or its beginning; at other joins the ids are those of the whole text."""
    words = [word for word in ours.tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 3]
    joins = [(before + word[:cut], word[cut:] + after) for word in words[:40] for cut in range(1, len(word))
             for before in ("The ", "") for after in ("", " of seven", "\n12")]
    spanned = 0
    for context, continuation in joins:
        first, ids = ours._encode_pair(context, continuation)
        assert ours.tokenizer.decode(ids) == continuation
        spanned += first + ids != ours.tok_encode(context + continuation)
    assert len(joins) > spanned > 20
    assert all(log_p < 0 for log_p, _ in ours.loglikelihood(requests("loglikelihood", joins[:12]), disable_tqdm=True))


def test_rolling_log_likelihoods_are_those_of_hf(ours, theirs):
    long = " ".join(row["solution"] for row in ROWS * 6)
    assert len(ours.tok_encode(long)) > ours.max_length
    asked = requests("loglikelihood_rolling", [(ROWS[0]["solution"],), (long,)])
    found, expected = (model.loglikelihood_rolling(asked, disable_tqdm=True) for model in (ours, theirs))
    assert found[0] == pytest.approx(expected[0], abs=1e-4)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


def test_repeats_are_different_draws_in_any_order():
    model = DflashMcmcLM(pretrained=TINY, condition="temp", seed=3, **{"sampler.temperature": 1.5})
    asked = requests("generate_until", [(chat(model, row), {"until": [], "max_gen_toks": 16}) for row in ROWS[:3]])
    first = model.generate_until([asked[0], asked[0], asked[1], asked[2]], disable_tqdm=True)
    again = model.generate_until([asked[2], asked[0], asked[1], asked[0]], disable_tqdm=True)
    assert first[0] != first[1]
    assert again == [first[3], first[0], first[2], first[1]]


def test_the_commands_of_the_page_run(tmp_path):
    commands = page_commands(tmp_path, "yaml", pages.NEEDS_LM_EVAL)
    assert len(commands) == 3
    for command in commands:
        done = shell(command, tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "|arith_local" in done.stdout
    refused = shell(commands[0].replace("condition=ps", "condition=pss"), tmp_path)
    assert refused.returncode == 2
    assert "error: condition" in refused.stderr.splitlines()[-1]
