"""Small random models of several families, and a reference engine for them, for tests of the engines."""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from dflash_mcmc.engine.batching.attention import grouped_attention
from dflash_mcmc.types import Trajectory
from tests.reference import ReferenceEngine

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
_HYBRID = {**_SHAPE, "head_dim": 8, "num_hidden_layers": 4,
           "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
           "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
           "linear_conv_kernel_dim": 4}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
HYBRIDS = {
    "qwen3_5": lambda changes: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**_HYBRID, "rope_parameters": _ROPE, **changes})),
    "qwen3_next": lambda changes: Qwen3NextForCausalLM(Qwen3NextConfig(**{
        **_HYBRID, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, **changes})),
}
"""Models with recurrent layers: three of four. Every second layer of Qwen3-Next has experts."""


def random_model(family: str = "qwen3", sharpness: float = 4.0, **changes) -> torch.nn.Module:
    """A random model in float32 and eval mode. `changes` are changes of its configuration.

    `sharpness` scales the head so that the laws of tokens are neither flat nor almost certain. The norm weights are random
    too, because with ones the tests could not detect a norm that is left out or applied twice.
    """
    return randomised(lambda: (_FAMILIES | HYBRIDS)[family](changes), sharpness)


def randomised(build: Callable[[], torch.nn.Module], sharpness: float = 4.0) -> torch.nn.Module:
    """A model of this function with the weights that `random_model` describes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "ln_" in name:
                    parameter.add_(torch.rand_like(parameter) - 0.5)
                elif ".layers." in name or ".h." in name:
                    parameter.mul_(8.0)
            model.lm_head.weight.mul_(8.0 * sharpness)
    return model


class RememberingReference(ReferenceEngine):
    """A reference engine that computes the logits after a sequence once, for tests whose chains share sequences."""

    def __init__(self, *given):
        super().__init__(*given)
        self._known: dict[tuple, dict[str, np.ndarray]] = {}

    def _sources(self, trajectory: Trajectory) -> dict[str, np.ndarray]:
        after = (*trajectory.prompt.tolist(), *trajectory.tokens.tolist())
        key = (after, self.drafter and self._slot(trajectory))  # the draft's logits depend on the token's slot, too
        if key not in self._known:
            self._known[key] = super()._sources(trajectory)
            for logits in self._known[key].values():
                logits.flags.writeable = False
        return self._known[key]


@cache
def rows_do_not_depend_on_the_batch() -> bool:
    """Whether a row has the same bits in all batches of 8, 16, 24... rows on this machine. The engine relies on it."""
    # The widths occur in the models of this file and in the embedded model.
    return all(_bits_stay(*widths) for widths in ((32, 48), (128, 64), (128, 384), (384, 128), (128, 512)))


@cache
def queries_do_not_depend_on_the_others() -> bool:
    """Whether a query's attention has the same bits alone and among others on this machine: with the strict mode of Intel
    processors it has, on AMD's not. Tokens that are read in a piece then have the bits of tokens that are fed one by one."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(8, *size, 8, generator=generator) for size in ((4, 24), (2, 64), (2, 64)))
    sees = torch.ones(24, 64, dtype=torch.bool).tril()[None, None].expand(8, 1, 24, 64)
    together, _ = grouped_attention(None, query, key, value, sees)
    alone = [grouped_attention(None, query[:, :, at : at + 1], key, value, sees[:, :, at : at + 1])[0] for at in range(24)]
    return rows_do_not_depend_on_the_batch() and torch.equal(torch.cat(alone, dim=1), together)


def _bits_stay(inputs: int, outputs: int) -> bool:
    """Whether that holds for a linear layer of these widths."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(outputs, inputs, generator=generator), torch.randn(64, inputs, generator=generator)
    whole = torch.nn.functional.linear(rows, weight)
    return all(torch.equal(torch.nn.functional.linear(rows[start:end], weight), whole[start:end])
               for start in range(0, 64, 8) for end in range(start + 8, 65, 8))
