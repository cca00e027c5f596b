"""Families beside Qwen3, Qwen2 and Llama: random checkpoints of transformers' own configurations.

log p of every drawn token is compared with one forward of transformers over the whole sequence.
"""

import importlib.util

import numpy as np
import pytest
import torch
import transformers

from dflash_mcmc.rng import Key
from tests.engine.batching.test_batched import PROMPTS, SAMPLERS
from tests.vllm.running import TOLERANCE, engine_of, target_of

_IDS = dict(vocab_size=64, eos_token_id=3, bos_token_id=None, pad_token_id=None, max_position_embeddings=192,
            tie_word_embeddings=False)
_SHAPE = dict(**_IDS, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
              head_dim=32)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
FAMILIES = {  # name: (class, configuration, dtype, tolerance in nats)
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", dict(**_SHAPE, sliding_window=32, query_pre_attn_scalar=32),
               "float32", TOLERANCE),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", dict(**_SHAPE, num_local_experts=4, num_experts_per_tok=2,
                                                         sliding_window=32, rope_scaling=None), "float32", TOLERANCE),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_SHAPE, **_EXPERTS}, "float32", TOLERANCE),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", dict(**_SHAPE, num_local_experts=4), "float32", TOLERANCE),
    # vLLM's latent attention on a CPU rounds more than float32.
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", dict(
        **_IDS, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, topk_method="noaux_tc", n_group=1, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=64, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128), "float32", 0.1),
    # vLLM's linear attention on a CPU runs in bfloat16 alone.
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {
        **_SHAPE, **_EXPERTS, "shared_expert_intermediate_size": 64, "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
        "bfloat16", 0.3),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {
        **_SHAPE, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128}, "bfloat16", 0.3),
}
NEEDS_TORCHVISION = ("qwen3_5",)
"""Families whose class in vLLM imports torchvision. `make vllm` runs them with tests/vllm/torchvision_on_a_cpu.py."""


def random_of(family: str, **changes):
    """A model with random weights, in float32."""
    model_class, config_class, values, _, _ = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**{**values, **changes})).eval()
        model.get_output_embeddings().weight.data.mul_(20.0)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_log_p_is_that_of_transformers(tmp_path, family):
    if family in NEEDS_TORCHVISION and importlib.util.find_spec("torchvision") is None:
        pytest.skip("vLLM's class imports torchvision: make vllm")
    *_, dtype, tolerance = FAMILIES[family]
    model = random_of(family).to(getattr(torch, dtype))
    target = target_of(model, tmp_path, [3])._replace(dtype=dtype)
    engine = engine_of(target, float32_head=dtype != "float32")
    worst, varied = 0.0, set()
    for done in engine.run((index, SAMPLERS["power_mh_early"].chain(prompt % 64, 12, Key(index)))
                           for index, prompt in enumerate(PROMPTS)):
        assert done.result is not None, done.failure
        drawn = done.result.trajectory
        with torch.inference_mode():
            logits = model(torch.from_numpy(drawn.sequence)[None], use_cache=False).logits[0, len(drawn.prompt) - 1 : -1]
        expected = torch.log_softmax(logits.double(), -1).gather(1, torch.from_numpy(drawn.tokens)[:, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(expected - drawn.log_p).max()))
        varied.add(drawn.tokens.tobytes())
    print(family, worst)
    assert worst < tolerance
    assert len(varied) == len(PROMPTS)
