"""Targets and drafts with random weights at the shape of real ones. Time and memory are real; texts mean nothing."""

from typing import Any

import torch

from dflash_mcmc.draft.network.dflash import DFlash, DFlashShape

SHARPNESS = 8.0
"""Standard deviation of the target's logits. Continuations then have about a nat of entropy per token, as real texts have."""


def target(config: Any, dtype: torch.dtype, device: str = "cpu") -> Any:
    """A causal language model of transformers, in eval mode.

    Args:
        config: its configuration.
    """
    import transformers

    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    head = model.get_output_embeddings().weight
    with torch.no_grad():  # the final norm's output has mean square 1 before its weight is applied
        model.base_model.norm.weight.fill_(SHARPNESS / (float(head[:1000].float().std()) * head.shape[1] ** 0.5))
    return model.requires_grad_(False)


def draft(shape: DFlashShape, dtype: torch.dtype, device: str = "cpu") -> DFlash:
    """A DFlash draft, in eval mode."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        network = DFlash(shape).to(dtype).eval()
        for parameter in network.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(0.0, parameter.shape[1] ** -0.5)
    return network.requires_grad_(False)
