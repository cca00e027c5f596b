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

from dflash_mcmc.draft.network.dflash.network import DFlash
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing import sequences
from dflash_mcmc.train.blocks import TrainingBlocks
from dflash_mcmc.train.candidates import Candidates
from dflash_mcmc.train.features import Known, TargetReader

_SLOTS_AT_ONCE = 8192
"""Slots whose logits are in memory at the same time. With 152 thousand ids they take 5 GB in float32."""


class Objective(NamedTuple):
    """The loss of a slot and the decay `gamma` of its weight."""

    target: str
    """`tokens`, `p` or `p_alpha`; see `DraftPlan`."""
    alpha: float
    gamma: float

    @property
    def power(self) -> float | None:
        """The power of the target's distribution that the draft learns; None if it learns tokens."""
        return {"tokens": None, "p": 1.0, "p_alpha": self.alpha}[self.target]


def slot_weights(blocks: TrainingBlocks, num_drafted: int, gamma: float) -> torch.Tensor:
    """Weights of the slots k = 1, 2, ...: float32 (rows, blocks, num_drafted).

    They are exp(-(k - 1) / gamma), or 0 for padding and positions after the end.
    """
    slots = torch.arange(1, num_drafted + 1, device=blocks.anchors.device)
    anchors = blocks.anchors[..., None]
    used = (anchors >= 0) & (anchors + slots < blocks.lengths[:, None, None])
    return used * torch.exp(-(slots - 1) / gamma)


def loss_sum(draft: DFlash, model: LanguageModel, blocks: TrainingBlocks, objective: Objective,
             autocast: bool, candidates: Candidates | None = None, known: Known | None = None) -> torch.Tensor:
    """The sum over all slots of weight times loss, in nats.

    Sums over parts of a batch, from several processes, can be added. To get the mean, divide the total by the sum of the
    whole batch's weights.

    Args:
        candidates: the ids to normalise over; None for all ids.
        known: what the target says along the sequences; None reads the target.
    """
    weights = slot_weights(blocks, draft.shape.num_drafted, objective.gamma)
    rows, anchors, slots = torch.nonzero(weights, as_tuple=True)
    positions = blocks.anchors[rows, anchors] + slots + 1
    if known is None:
        known = TargetReader(model, draft.shape.target_layers, objective.power, candidates is not None)(blocks.tokens)
    with torch.autocast(blocks.tokens.device.type, torch.bfloat16, enabled=autocast):
        hidden = sequences.drafted(draft, model, known.features, *blocks)[rows, anchors, slots]
    # The target's distribution of a token is computed from the position before it.
    teacher, log_sums = (None if part is None else part[rows, positions - 1] for part in known[1:])
    every = DraftedSlots(hidden, blocks.tokens[rows, positions], weights[rows, anchors, slots], teacher, log_sums)

    def piece(part: slice) -> torch.Tensor:
        some = DraftedSlots._make(None if values is None else values[part] for values in every)
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=autocast):
            logits = model.head_logits(some.hidden).float() if candidates is None else candidates.logits(
                some.hidden, model.head.weight.detach(), getattr(model.head, "bias", None))
        return (some.weights * _of_slots(model, objective, candidates, logits, some)).sum()

    parts = [slice(start, start + _SLOTS_AT_ONCE) for start in range(0, len(hidden), _SLOTS_AT_ONCE)]
    if len(parts) == 1:
        return piece(parts[0])
    # The backward pass recomputes the logits. Only the logits of one part are in memory at a time.
    return sum((checkpoint(piece, part, use_reentrant=False) for part in parts), hidden.sum() * 0.0)


class DraftedSlots(NamedTuple):
    """The slots of a loss: the draft's hidden states (n, hidden), the responses' tokens (n,), the weights (n,), and what the
    target says there: hidden states (n, hidden) and logarithms of sums (n,), or None."""

    hidden: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    teacher: torch.Tensor | None
    log_sums: torch.Tensor | None


def _of_slots(model: LanguageModel, objective: Objective, candidates: Candidates | None, logits: torch.Tensor,
              slots: DraftedSlots) -> torch.Tensor:
    """The loss of each slot, (n,), from the draft's logits (n, ids or candidates)."""
    if objective.power is None or slots.teacher is None:
        labels = slots.labels if candidates is None else candidates.places(slots.labels)
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    with torch.no_grad():
        target = model.logits(slots.teacher) if candidates is None else model.logits_of(slots.teacher, candidates.ids)
    if candidates is None:
        return kl_divergences(logits, target, objective.power)
    if slots.log_sums is None:
        raise ValueError("a loss of a distribution over candidates needs the logarithms of the target's sums")
    return candidates.kl_divergences(logits, target, slots.log_sums, objective.power)


def kl_divergences(logits: torch.Tensor, target: torch.Tensor, alpha: float) -> torch.Tensor:
    """KL(p_alpha | q) in nats, shape (n,), with q = softmax(logits) and p_alpha = softmax(alpha · target).

    `logits` and `target` have the shape (n, ids). p_alpha is the target's next-token distribution to the power alpha,
    normalised. The minimum is 0, at q = p_alpha.
    """
    log_p = torch.log_softmax(alpha * target, dim=-1)
    # Ids without a token have probability 0 in both distributions and would give 0 · (-inf + inf).
    ratio = torch.where(torch.isneginf(target), 0.0, log_p - torch.log_softmax(logits, dim=-1))
    return (log_p.exp() * ratio).sum(dim=-1)
