"""The families of models that the engine of slots refuses, each with the kind of layer that is the reason."""

from __future__ import annotations

from typing import Any

import torch

from dflash_mcmc.engine.batching.cache import LINEAR, recurrent_shape
from dflash_mcmc.engine.batching.masks import unmasked_types
from dflash_mcmc.errors import UserError

_IN_VLLM = frozenset((
    "BambaForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM",
    "FalconH1ForCausalLM", "FalconMambaForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM", "GlmMoeDsaForCausalLM",
    "GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "JambaForCausalLM", "KimiLinearForCausalLM",
    "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "NemotronHForCausalLM",
    "OlmoHybridForCausalLM", "Zamba2ForCausalLM"))
"""Classes that this engine refuses and vLLM 0.32 has."""
_NOT_IN_VLLM = frozenset((
    "GPTNeoForCausalLM", "MiniMaxForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "ZambaForCausalLM",
    "xLSTMForCausalLM"))
"""Classes that neither has."""
_REASONS = {
    LINEAR: "a recurrent state, which cannot be rolled back",
    "conv": "a state, which cannot be rolled back",
    "hybrid": "attention beside a recurrent state, which cannot be rolled back",
    "hybrid_sliding": "attention beside a recurrent state, which cannot be rolled back",
    "indexed_attention": "the tokens that a query attends to are chosen by an index with a cache of its own",
    "compressed_sparse_attention": "keys of several tokens are merged",
    "heavily_compressed_attention": "keys of several tokens are merged",
}


def refuse(model: Any) -> None:
    """Raises UserError for a model of `transformers` whose layers the engine of slots does not compute."""
    found = _refused_layers(model, model.config.get_text_config())
    if found:
        raise refused(model, f"has {found}", "attention over all earlier tokens, over a window or in chunks, or the linear "
                      "attention of Qwen3-Next and Qwen3.5, in every layer")


def refused(model: Any, what: str, allowed: str) -> UserError:
    """The error for a model, in one line that says whether vLLM has the model."""
    name = type(model).__name__
    if name in _IN_VLLM:
        other = f", or engine=vllm, which has {name}"
    elif name in _NOT_IN_VLLM:
        other = f" (engine=vllm does not have {name} either)"
    else:
        other = f", or engine=vllm, if vLLM has {name}"
    return UserError(f"model.path: {name} {what}; allowed with engine=slots: {allowed}{other}")


def _refused_layers(model: Any, config: Any) -> str | None:
    """The kind of the layers that are not computed here, with the reason; None if there are none."""
    computed = recurrent_shape(config, torch.float32) is not None
    types = sorted(unmasked_types(config) - ({LINEAR} if computed else set()))
    if types:
        return f"{' and '.join(types)} layers ({_REASONS.get(types[0], 'a cache of another form')})"
    if getattr(model, "_is_stateful", False) and not computed:
        return "recurrent layers (a recurrent state, which cannot be rolled back)"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "local attention layers (a window that the model applies by the place in memory)"
    if getattr(config, "use_bidirectional_attention", None):
        return "bidirectional attention layers (they look at later tokens)"
    if getattr(config, "altup_num_inputs", None):
        return "AltUp layers (a token has several hidden states)"
    if getattr(config, "num_kv_shared_layers", None):
        return "layers that share the keys and values of another layer (they have no cache of their own)"
    return None
