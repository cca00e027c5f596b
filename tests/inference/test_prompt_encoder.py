"""Positions that config.json states are those of the configuration of `transformers`."""

from __future__ import annotations

import json

import pytest
import transformers

from dflash_mcmc.inference.prompt_encoder import max_positions, stated_positions

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
