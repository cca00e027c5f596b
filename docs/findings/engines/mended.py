"""Mends vLLM's speculation on CPUs: `--worker-extension-cls docs.findings.engines.mended.Mended`, in a checkout."""

import torch
from vllm.v1.sample import rejection_sampler


def expanded(x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0,
             replace_to: int = 0) -> torch.Tensor:
    """`expand_batch_to_tokens` in the type of its input, whose kernel for CPUs fills a copy."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts.long())


class Mended:
    """A worker extension without methods: the worker imports this module."""


rejection_sampler.expand_batch_to_tokens = expanded
