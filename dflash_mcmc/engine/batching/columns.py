"""Further columns of a token, which an operation can ask for: the entropy of p, and log q and interval under further laws.

They come from the logits that the token was drawn from or scored with, so that no forward is added.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.stepper import Group
from dflash_mcmc.ops import Operation, SamplingParams

_LAW = 3
"""Columns of a law: log q, and the two ends of the interval."""


def width(operation: Operation) -> int:
    """The number of columns of an operation: 0 if it asks for none, else one for the entropy and three for each law."""
    return 1 + _LAW * len(operation.laws) if operation.laws or operation.entropy else 0


def split(operation: Operation | None, columns: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(laws, entropy) of `Trajectory` from columns (tokens, k); None for a part that the operation does not ask for."""
    if operation is None:
        return None, None
    count = len(operation.laws)
    under = columns[:, 1 : 1 + _LAW * count].reshape(len(columns), count, _LAW).copy() if count else None
    return under, columns[:, 0].copy() if operation.entropy else None


def of_tokens(tokens: torch.Tensor, logits: torch.Tensor, target: laws.Weights, further: Sequence[SamplingParams],
              history: laws.History) -> torch.Tensor:
    """Columns of tokens, float64 (rows, k).

    Args:
        tokens: int64 (rows,).
        logits: float32 (rows, vocabulary), of the source that the tokens are drawn from.
        target: weights of the (blended) target.
        further: the further laws.
        history: the tokens that penalties read.
    """
    parts = [entropy(target)[:, None]]
    for params in further:
        weights = laws.weigh(laws.process(logits, params, history))
        parts += [weights.log_probability(tokens)[:, None], laws.intervals(weights, tokens)]
    return torch.cat(parts, dim=1)


def of_groups(groups: Sequence[Group], tokens: torch.Tensor, logits: dict[str, torch.Tensor], target: laws.Weights,
              history: laws.History, slots: int, num_columns: int) -> torch.Tensor | None:
    """Columns of the tokens of all rows, each by its own group: float64 (rows * slots, num_columns).

    Returns None if no group asks for columns.

    Args:
        slots: tokens of a row.
    """
    if not any(group.columns for group in groups):
        return None
    found = torch.zeros(len(tokens), num_columns, dtype=torch.float64, device=tokens.device)
    for group in groups:
        if group.columns:
            mine = slice(None) if group.rows is None else group.slots(slots)
            columns = of_tokens(tokens[mine], logits[group.source][mine], _of_rows(target, mine), group.laws,
                                history if group.rows is None else history.of_rows(group.slots(slots)))
            found[mine, : columns.shape[1]] = columns
    return found


def entropy(weights: laws.Weights) -> torch.Tensor:
    """Entropy in nats of rows of weights, float64 (rows,): log Z - sum v log v / Z for weights v with sum Z."""
    total = weights.upto[:, -1]
    return total.log() - torch.special.xlogy(weights.values, weights.values).sum(dim=(1, 2), dtype=torch.float64) / total


def _of_rows(weights: laws.Weights, rows: slice | torch.Tensor) -> laws.Weights:
    return laws.Weights(*(values[rows] for values in weights))
