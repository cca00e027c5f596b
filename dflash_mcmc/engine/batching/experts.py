"""Mixtures of experts whose numbers do not depend on the batch.

`transformers` gives each expert the tokens of the whole batch that chose it. On a CPU the bits of a product depend on its
number of rows, so the numbers of a chain would depend on the other chains. Here each expert has a multiple of 8 rows, which
ensures the same bits (notebook, "Bits"), and a token's experts are summed in the order of their weights.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dflash_mcmc.engine.batching.ladder import round_up

NAME = "batch_invariant"
_ROW_STEP = 8
_DENSE = frozenset(("Llama4TextExperts",))
"""Classes that compute every expert for every token."""


def batch_invariant_experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's experts, (tokens, width).

    Args:
        module: experts of a class that `use_experts_implementation` of `transformers` decorates.
        hidden: (tokens, width).
        chosen: int64 (tokens, k), the experts of each token.
        weights: (tokens, k).
    """
    numbers = chosen.reshape(-1)
    given = torch.empty(len(numbers), hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    for expert in numbers.unique().tolist():
        pairs = (numbers == expert).nonzero()[:, 0]
        rows = hidden[pairs // chosen.shape[1]]
        padded = torch.nn.functional.pad(rows, (0, 0, 0, round_up(len(rows), _ROW_STEP) - len(rows)))
        given[pairs] = _expert(module, expert, padded)[: len(rows)]
    return (given * weights.reshape(-1, 1)).view(*chosen.shape, -1).sum(dim=1).to(hidden.dtype)


def _expert(module: Any, number: int, rows: torch.Tensor) -> torch.Tensor:
    """The output of one expert, (rows, width)."""
    inner = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", number, rows)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    output = _linear(module, "down_proj", number, inner)
    return module.post_expert_norm(output) if module.has_post_expert_norm else output


def _linear(module: Any, name: str, number: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[number]
    bias = getattr(module, f"{name}_bias")[number] if module.has_bias else None
    return torch.nn.functional.linear(rows, weight.t() if module.is_transposed else weight, bias)


def has_experts(decoder: torch.nn.Module) -> bool:
    """Whether a model has experts whose implementation can be chosen."""
    return any(hasattr(module, "has_post_expert_norm") for module in decoder.modules())


def depends_on_batch(decoder: torch.nn.Module) -> bool:
    """Whether a model has experts whose numbers depend on the batch, whatever implementation is chosen."""
    return any(type(module).__name__.endswith("Experts") and type(module).__name__ not in _DENSE
               and not hasattr(module, "has_post_expert_norm") for module in decoder.modules())


ALL_EXPERTS_FUNCTIONS.register(NAME, batch_invariant_experts)
