"""`model.rope_scaling` gives the model that transformers makes of such a configuration, beyond the original length too."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig

from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.model.files import Checkpoint
from dflash_mcmc.model.hf import override_rope
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.tokenizer import max_positions
from dflash_mcmc.types import ChainResult, Trajectory

TINY = PACKAGE / "assets" / "tiny"
YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.slow
def test_a_checkpoint_with_yarn_is_that_of_transformers_beyond_its_length(make_config):
    config = make_config("model.rope_scaling={rope_type:yarn,factor:2.0}")
    model = config.model.load("cpu")
    assert (model.max_positions, config.model.prompt_encoder().max_positions) == (2048, 2048)
    theirs = AutoConfig.from_pretrained(TINY)
    theirs.rope_parameters = {**theirs.rope_parameters, **YARN, "original_max_position_embeddings": 1024}
    theirs = AutoModelForCausalLM.from_pretrained(TINY, config=theirs).eval()

    def chain():
        path = yield Draw(Trajectory.start(np.arange(1100) * 7 % 400), 4, SamplingParams(), Key(1))
        return ChainResult(path)

    path = next(iter(BatchedEngine(model, None, 1, 1104).run([(0, chain())]))).result.trajectory
    tokens = torch.from_numpy(np.concatenate([path.prompt, path.tokens]))[None]

    def log_p(of: torch.nn.Module) -> np.ndarray:
        with torch.inference_mode():
            logits = of(input_ids=tokens).logits[0, 1099:-1].masked_fill(model.forbidden, -torch.inf)
        return torch.log_softmax(logits.double(), dim=-1).gather(1, tokens[0, 1100:, None])[:, 0].numpy()

    np.testing.assert_allclose(path.log_p, log_p(theirs), atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(TINY).eval()
    assert np.abs(path.log_p - log_p(plain)).max() > 0.01, "without YaRN the numbers differ"


def test_the_field_is_part_of_the_identity(make_config):
    plain, changed = identity_of(make_config()), identity_of(make_config("model.rope_scaling={rope_type:yarn,factor:2.0}"))
    assert plain["model.rope_scaling"] is None
    assert changed == {**plain, "model.rope_scaling": YARN}


def test_each_type_of_layer_has_its_own():
    config = Gemma3TextConfig(max_position_embeddings=64)
    before = config.rope_parameters["sliding_attention"]
    with pytest.raises(ConfigError, match=r"model.rope_scaling: .*; allowed: parameters for each of full_attention, sliding"):
        override_rope(config, YARN)
    override_rope(config, {"full_attention": YARN})
    assert config.rope_parameters["sliding_attention"] == before
    assert config.rope_parameters["full_attention"] == {"rope_theta": 1e6, **YARN, "original_max_position_embeddings": 64}
    assert max_positions(config) == 128


@pytest.mark.parametrize(("given", "message"), [
    ({"rope_type": "none"}, "allowed: a rope_type of default, "), ({"rope_type": "yarn"}, "Missing required keys"),
    ({"rope_type": "yarn", "faktor": 2.0}, "allowed: a mapping with attention_factor, "), ({"factor": 2.0}, "a rope_type of"),
    ({"rope_type": "yarn", "factor": -1.0}, "factor, a number > 0")])
def test_wrong_values_are_one_line(given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        override_rope(LlamaConfig(max_position_embeddings=64), given)
    assert "\n" not in str(caught.value)


GOOD = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(("values", "wrong"), [
    ({"rope_parameters": {}}, "rope_parameters"), ({"rope_scaling": {}}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_theta"),
    ({"rope_parameters": {**GOOD, "rope_theta": 0}}, "rope_parameters.rope_theta"),
    ({"rope_theta": 0}, "rope_theta"), ({"rope_theta": float("nan")}, "rope_theta"), ({"rope_theta": "1e4"}, "rope_theta"),
    ({"rope_theta": float("inf")}, "rope_theta"), ({"rope_local_base_freq": -1}, "rope_local_base_freq"),
    *(({"rope_parameters": {**GOOD, **YARN, "factor": factor}}, "rope_parameters.factor")
      for factor in (-1, 0, float("nan"), True, "2")),
    ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "rope_scaling.factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 0}}, "rope_scaling.low_freq_factor"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, -1]}}, "rope_scaling.short_factor"),
    ({"rope_parameters": {"full_attention": GOOD, "sliding_attention": {}}}, "rope_parameters"),
    ({"rope_parameters": {"full_attention": {**GOOD, "rope_theta": -1}}}, "rope_parameters.rope_theta")])
def test_a_rotation_that_no_model_has_is_named(tmp_path, values, wrong):
    (tmp_path / "config.json").write_text(json.dumps(values))
    for content in (values, {"text_config": values}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=f"a folder whose config.json has for {re.escape(wrong)} .*, and not ") as caught:
            Checkpoint("model.path", str(tmp_path), None, "").config()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", [
    {}, {"rope_theta": 1e6, "rope_scaling": None}, {"rope_parameters": GOOD},
    {"rope_theta": 5, "rope_parameters": {"factor": 2}},
    {"rope_parameters": {"full_attention": GOOD, "sliding_attention": None}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0, "attention_factor": None}}])
def test_other_rotations_are_read(tmp_path, values):
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert Checkpoint("model.path", str(tmp_path), None, "").config() == values


def test_where_it_has_no_effect_it_is_refused(make_config):
    with pytest.raises(ConfigError, match="allowed: null for a model without a rotary embedding"):
        override_rope(GPT2Config(), YARN)
    with pytest.raises(UserError, match=r"model.rope_scaling: given 3; allowed: null, or a mapping"):
        make_config("model.rope_scaling=3")
    with pytest.raises(UserError, match=r"model.rope_scaling: given .*; allowed: null with engine=vllm"):
        make_config("model.rope_scaling={rope_type:yarn,factor:2.0}", "engine=vllm")


@pytest.mark.parametrize(("rope", "length", "expected"), [
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 40, 64),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 80, 80),
    ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}, 128, 32),
    ({"rope_type": "default"}, 40, 40)])
def test_positions_of_a_rotary_embedding(rope, length, expected):
    assert max_positions(LlamaConfig(max_position_embeddings=length, rope_parameters={"rope_theta": 1e4, **rope})) == expected
