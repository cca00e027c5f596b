"""Small random models of several families, for the engines' tests."""

from __future__ import annotations

from functools import cache

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_IDS = dict(vocab_size=61, eos_token_id=3, bos_token_id=None, pad_token_id=None)
_SHAPE = dict(**_IDS, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=192, tie_word_embeddings=False)
_FAMILIES = {
    "qwen3": lambda changes: Qwen3ForCausalLM(Qwen3Config(**{**_SHAPE, "head_dim": 8, **changes})),
    "qwen2": lambda changes: Qwen2ForCausalLM(Qwen2Config(**{**_SHAPE, **changes})),
    "llama": lambda changes: LlamaForCausalLM(LlamaConfig(**{**_SHAPE, **changes})),
    "gpt2": lambda changes: GPT2LMHeadModel(GPT2Config(**{**_IDS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 192,
                                                          "tie_word_embeddings": False, **changes})),
}
FAMILIES = tuple(_FAMILIES)


def random_model(family: str = "qwen3", sharpness: float = 4.0, **changes) -> torch.nn.Module:
    """Float32, in eval mode; `sharpness` scales the head so that laws are neither flat nor certain; `changes`: of the config.

    Norm weights are random as well: with ones, a norm that is left out or applied twice would hardly show.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _FAMILIES[family](changes).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "ln_" in name:
                    parameter.add_(torch.rand_like(parameter) - 0.5)
                elif ".layers." in name or ".h." in name:
                    parameter.mul_(8.0)
            model.lm_head.weight.mul_(8.0 * sharpness)
    return model


@cache
def rows_do_not_depend_on_the_batch() -> bool:
    """Whether this machine's arithmetic gives a row the same bits in every batch of eights, as the engine's shapes rely on."""
    return all(_bits_stay(*widths) for widths in ((32, 48), (128, 64), (128, 384), (384, 128), (128, 512)))


def _bits_stay(inputs: int, outputs: int) -> bool:
    """In a layer of these widths: those of the models here and of the embedded one."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(outputs, inputs, generator=generator), torch.randn(64, inputs, generator=generator)
    whole = torch.nn.functional.linear(rows, weight)
    return all(torch.equal(torch.nn.functional.linear(rows[start:end], weight), whole[start:end])
               for start in range(0, 64, 8) for end in range(start + 8, 65, 8))
