"""Positions that config.json states are those of `transformers`, and texts that cannot fit do not reach the tokenizer."""

import json

import pytest
import transformers

from dflash_mcmc.config.schema import Job
from dflash_mcmc.runner import plan
from dflash_mcmc.tokenizer import PromptEncoder, max_positions, stated_positions
from tests.refusals import refused
from tests.runs import execute

QWEN3 = {"model_type": "qwen3", "max_position_embeddings": 40960, "sliding_window": None, "use_sliding_window": False}


@pytest.mark.parametrize(("more", "expected"), [
    ({}, 40960),
    ({"rope_scaling": None, "rope_theta": 1e6}, 40960),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 40960),
    ({"sliding_window": 512}, 40960),
    ({"use_sliding_window": None}, None),
    ({"use_sliding_window": True, "sliding_window": 512}, None),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4096}}, None),
    ({"rope_scaling": {"type": "longrope"}}, None),
    ({"model_type": "mistral"}, None),
    ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 10}}, None),
    ({"max_position_embeddings": None}, None),
])
def test_usual_configurations_are_read_as_transformers_reads_them(tmp_path, more, expected):
    values = {**QWEN3, **more}
    assert stated_positions(values) == expected
    if expected is not None:
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert max_positions(transformers.AutoConfig.from_pretrained(tmp_path)) == expected


class _Tokenizer:
    """A tokenizer whose longest token has three characters. It counts its calls."""

    calls = 0

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "abc": 1}

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        self.calls += 1
        return {"input_ids": [len(text) % 2]}

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(("positions", "most", "reason"), [
    (100, 1_000_000, "since the model has 100 positions and a token at most 3 characters"),
    (100_000, 1_200_000, "since the model has 100,000 positions and a token at most 3 characters"),
    (None, 2**24, "the most that is tokenized")])
def test_a_text_that_cannot_fit_does_not_reach_the_tokenizer(positions, most, reason):
    tokenizer = _Tokenizer()
    encoder = PromptEncoder(tokenizer, positions)
    assert encoder.encode("a" * most).tolist() == [0]
    with refused(f"allowed: at most {most:,} characters, {reason}", start=f"prompt: given a text of {most + 1:,} characters"):
        encoder.encode("a" * (most + 1))
    assert tokenizer.calls == 1


@pytest.mark.parametrize("length", [2_000_000, pytest.param(100_000_000, marks=pytest.mark.slow)])
def test_a_question_that_cannot_fit_is_one_line(make_config, tmp_path, length):
    (tmp_path / "long.jsonl").write_text(json.dumps({"question": "a" * length, "answer": "1"}))
    config = make_config("dataset=jsonl", f"dataset.path={tmp_path / 'long.jsonl'}", "sampler=greedy")
    with refused("; allowed: at most ", start=f"prompt: given a text of {length // 1_000_000},0"):
        plan.check([Job(config)])
    with refused("; allowed: at most ", start=f"prompt: given a text of {length // 1_000_000},0"):
        execute(config)
    assert not list(tmp_path.glob("default/*"))


def test_an_id_outside_the_vocabulary_is_refused():
    assert PromptEncoder(_Tokenizer(), 10, 2).encode("a").tolist() == [1]
    with refused("gives the id 1 for a prompt; allowed: ids from 0 to 0", start="model.path: given a tokenizer of 2 tokens"):
        PromptEncoder(_Tokenizer(), 10, 1).encode("a")
