"""Small random models of several families, for the engines' tests."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

_SHAPE = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=3,
              bos_token_id=None, pad_token_id=None)
_FAMILIES = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=8)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE)),
}
FAMILIES = tuple(_FAMILIES)


def random_model(family: str = "qwen3", sharpness: float = 4.0) -> torch.nn.Module:
    """Float32, in eval mode; `sharpness` scales the head so that laws are neither flat nor certain."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _FAMILIES[family]().eval()
        with torch.no_grad():
            for layer in model.model.layers:
                for parameter in layer.parameters():
                    if parameter.ndim == 2:
                        parameter.mul_(8.0)
            model.lm_head.weight.mul_(8.0 * sharpness)
    return model
