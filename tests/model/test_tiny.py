"""`model=tiny`: the embedded checkpoint has the shape of the recipe, and an accuracy that is neither too low nor too high."""

import pytest
import torch

from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.store.records import read_records
from tests.runs import execute
from tests.train import embedded

FOLDER = PACKAGE / "assets" / "tiny"


def test_the_embedded_model_is_small_and_has_the_stated_shape(make_config):
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 8e6
    model = make_config().model.load("cpu")
    assert 1_000_000 < sum(p.numel() for p in [*model.decoder.parameters()]) < 4_000_000
    assert len(model.layers) >= 8
    assert model.dtype == torch.float32
    assert model.vocab_size == embedded.VOCAB_SIZE == embedded.build_config().vocab_size


def test_the_tokenizer_splits_digits_and_restores_any_text(make_config):
    model = make_config().model.load("cpu")
    for text in ("Ann has 47 apples.", "1234*56=69104", "naïve 北京 🍎 \x00 \\boxed{3}", "<think>\n\n</think>"):
        tokens = model.encode(text)
        assert model.decode(tokens) == text
    assert len(model.encode("12345")) == 5


def test_stop_ids_and_unused_rows_are_like_those_of_qwen3(make_config):
    model = make_config().model.load("cpu")
    assert set(model.stop_ids) == set(model.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    assert model.forbidden[len(model.tokenizer):].all()
    assert not model.forbidden[: len(model.tokenizer)].any()
    assert model.forbidden.any()


def test_the_prompt_is_the_chat_template_without_thinking(make_config):
    config = make_config()
    tokenizer = config.model.load("cpu").tokenizer
    assert config.model.prompt(tokenizer, "hi") == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert make_config("model.enable_thinking=true").model.prompt(tokenizer, "hi").endswith("assistant\n")
    assert make_config("model.chat=false").model.prompt(tokenizer, "hi") == "hi"


@pytest.mark.slow
def test_greedy_accuracy_is_neither_too_low_nor_too_high_and_errors_are_spread_over_levels(make_config):
    result = execute(make_config("sampler=greedy"))
    summary, records = result.summary, read_records(result.folder)
    assert summary["num_problems"] == 300
    assert 0.45 <= summary["accuracy"] <= 0.80
    assert summary["no_answer"] <= 15
    shares = [sum(r["verdict"] == "correct" for r in records if r["level"] == level) / 60 for level in range(1, 6)]
    assert shares[0] > shares[-1]
    assert all(0.1 < share < 1.0 for share in shares[1:])


@pytest.mark.slow
def test_power_sampling_has_proposals_to_accept_and_reject(make_config):
    result = execute(make_config("condition=ps", "sampler.alpha=4", "dataset.limit=30"))
    assert 0.10 <= result.summary["moved_rate"] < result.summary["acceptance"] < 1.0
    records = read_records(result.folder)
    assert len({record["accepted"] for record in records}) > 3
