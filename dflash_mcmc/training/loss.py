"""The training loss of a draft. All blocks of some sequences are drafted in one forward.

Slot k of a block predicts the token k positions after the anchor. Its inputs are the target's features before the anchor and
the anchor's token. The prediction is compared with the token at that position, or with the target's distribution there.
Slot 0, padding and positions after the end do not count. Slot k has the weight exp(-(k - 1) / gamma), because all slots after
a wrong one are rejected (DFlash, arXiv 2602.06036).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from dflash_mcmc.forcing import sequences
from dflash_mcmc.inference.language_model import LanguageModel
from dflash_mcmc.inference.speculative.dflash.network import DFlash
from dflash_mcmc.training.blocks import TrainingBlocks
from dflash_mcmc.training.candidates import Candidates

_SLOTS_AT_ONCE = 8192
"""Slots whose logits are in memory at the same time. With 152 thousand ids they take 5 GB in float32."""


class Objective(NamedTuple):
    """The loss of a slot and the decay `gamma` of its weight."""

    target: str
    """`tokens`, `p` or `p_alpha`; see `DraftPlan`."""
    alpha: float
    gamma: float


def slot_weights(blocks: TrainingBlocks, num_drafted: int, gamma: float) -> torch.Tensor:
    """Weights of the slots k = 1, 2, ...: float32 (rows, blocks, num_drafted).

    They are exp(-(k - 1) / gamma), or 0 for padding and positions after the end.
    """
    slots = torch.arange(1, num_drafted + 1, device=blocks.anchors.device)
    anchors = blocks.anchors[..., None]
    used = (anchors >= 0) & (anchors + slots < blocks.lengths[:, None, None])
    return used * torch.exp(-(slots - 1) / gamma)


def loss_sum(draft: DFlash, model: LanguageModel, blocks: TrainingBlocks, objective: Objective,
             autocast: bool, candidates: Candidates | None = None, features: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over all slots of weight times loss, in nats.

    Sums over parts of a batch, from several processes, can be added. To get the mean, divide the total by the sum of the
    whole batch's weights.

    Args:
        candidates: the ids to normalise over, for the target `tokens`; None for all ids.
        features: (rows, length, features · hidden), the target's features, for the target `tokens`; None reads the target.
    """
    weights = slot_weights(blocks, draft.shape.num_drafted, objective.gamma)
    rows, anchors, slots = torch.nonzero(weights, as_tuple=True)
    positions = blocks.anchors[rows, anchors] + slots + 1
    layers = draft.shape.target_layers
    teacher = None
    if features is None:
        reading = sequences.read(model, blocks.tokens, layers)
        features = reading.features(model, layers)
        # The target's distribution of a token is computed from the position before it.
        teacher = None if objective.target == "tokens" else reading.hidden[rows, positions - 1]
    with torch.autocast(blocks.tokens.device.type, torch.bfloat16, enabled=autocast):
        hidden = sequences.drafted(draft, model, features, *blocks)[rows, anchors, slots]
    labels, weights = blocks.tokens[rows, positions], weights[rows, anchors, slots]

    def piece(part: slice) -> torch.Tensor:
        targets = None if teacher is None else teacher[part]
        if candidates is not None:
            return _of_candidates(model, candidates, autocast, hidden[part], labels[part], weights[part])
        return _piece(model, objective, autocast, hidden[part], labels[part], weights[part], targets)

    parts = [slice(start, start + _SLOTS_AT_ONCE) for start in range(0, len(labels), _SLOTS_AT_ONCE)]
    if len(parts) == 1:
        return piece(parts[0])
    # The backward pass recomputes the logits. Only the logits of one part are in memory at a time.
    return sum((checkpoint(piece, part, use_reentrant=False) for part in parts), hidden.sum() * 0.0)


def _piece(model: LanguageModel, objective: Objective, autocast: bool, hidden: torch.Tensor, labels: torch.Tensor,
           weights: torch.Tensor, teacher: torch.Tensor | None) -> torch.Tensor:
    with torch.autocast(hidden.device.type, torch.bfloat16, enabled=autocast):
        logits = model.head_logits(hidden).float()
    if teacher is None:
        return (weights * torch.nn.functional.cross_entropy(logits, labels, reduction="none")).sum()
    with torch.no_grad():
        target = model.logits(teacher)
    return (weights * kl_divergences(logits, target, objective.alpha if objective.target == "p_alpha" else 1.0)).sum()


def _of_candidates(model: LanguageModel, candidates: Candidates, autocast: bool, hidden: torch.Tensor, labels: torch.Tensor,
                   weights: torch.Tensor) -> torch.Tensor:
    """The cross-entropy over the candidates."""
    with torch.autocast(hidden.device.type, torch.bfloat16, enabled=autocast):
        logits = candidates.logits(hidden, model.head.weight.detach(), getattr(model.head, "bias", None))
    return (weights * torch.nn.functional.cross_entropy(logits, candidates.places(labels), reduction="none")).sum()


def kl_divergences(logits: torch.Tensor, target: torch.Tensor, alpha: float) -> torch.Tensor:
    """KL(p_alpha | q) in nats, shape (n,), with q = softmax(logits) and p_alpha = softmax(alpha · target).

    `logits` and `target` have the shape (n, ids). p_alpha is the target's next-token distribution to the power alpha,
    normalised. The minimum is 0, at q = p_alpha.
    """
    log_p = torch.log_softmax(alpha * target, dim=-1)
    # Ids without a token have probability 0 in both distributions and would give 0 · (-inf + inf).
    ratio = torch.where(torch.isneginf(target), 0.0, log_p - torch.log_softmax(logits, dim=-1))
    return (log_p.exp() * ratio).sum(dim=-1)
