"""What a draft learns by: all blocks of some sequences in one forward, against the target's tokens or its laws.

Slot k of a block predicts the token k places behind its anchor, from the target's features before the anchor and the
anchor's own token. What is compared is the same position; slot 0, padding and what lies behind the end do not count.
Slot k weighs exp(-(k - 1) / gamma): where it is wrong, what follows it is lost (DFlash, arXiv 2602.06036).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from dflash_mcmc.engine.language_model import LanguageModel
from dflash_mcmc.engine.speculative.dflash.network import DFlash
from dflash_mcmc.forcing import sequences
from dflash_mcmc.training.blocks import TrainingBlocks

_SLOTS_AT_ONCE = 8192
"""Slots whose logits are there at once: of 152 thousand ids, 5 GB in float32."""


class Objective(NamedTuple):
    """What the slots are compared with."""

    target: str
    """`tokens`, `p` or `p_alpha`; see `DraftPlan`."""
    alpha: float
    gamma: float


def slot_weights(blocks: TrainingBlocks, block_size: int, gamma: float) -> torch.Tensor:
    """float32 (rows, blocks, block_size - 1): exp(-(k - 1) / gamma) of slot k = 1, 2, ..., 0 where nothing is to be learnt."""
    slots = torch.arange(1, block_size, device=blocks.anchors.device)
    anchors = blocks.anchors[..., None]
    used = (anchors >= 0) & (anchors + slots < blocks.lengths[:, None, None])
    return used * torch.exp(-(slots - 1) / gamma)


def loss_sum(draft: DFlash, model: LanguageModel, blocks: TrainingBlocks, objective: Objective, autocast: bool) -> torch.Tensor:
    """The sum over all slots of weight times loss, in nats.

    It is a sum and not a mean, so that the parts of a batch, wherever they are computed, add up to the whole: divide by the
    sum of the whole batch's weights.
    """
    weights = slot_weights(blocks, draft.shape.block_size, objective.gamma)
    rows, anchors, slots = torch.nonzero(weights, as_tuple=True)
    positions = blocks.anchors[rows, anchors] + slots + 1
    layers = draft.shape.target_layers
    reading = sequences.read(model, blocks.tokens, layers)
    with torch.autocast(blocks.tokens.device.type, torch.bfloat16, enabled=autocast):
        hidden = sequences.drafted(draft, model, reading.features(model, layers), *blocks)[rows, anchors, slots]
    # The target's law of a token comes from the position before it.
    teacher = None if objective.target == "tokens" else reading.hidden[rows, positions - 1]
    labels, weights = blocks.tokens[rows, positions], weights[rows, anchors, slots]

    def piece(part: slice) -> torch.Tensor:
        laws = None if teacher is None else teacher[part]
        return _piece(model, objective, autocast, hidden[part], labels[part], weights[part], laws)

    parts = [slice(start, start + _SLOTS_AT_ONCE) for start in range(0, len(labels), _SLOTS_AT_ONCE)]
    if len(parts) == 1:
        return piece(parts[0])
    # Logits are made again on the way back, so that those of one part are there at a time.
    return sum((checkpoint(piece, part, use_reentrant=False) for part in parts), hidden.sum() * 0.0)


def _piece(model: LanguageModel, objective: Objective, autocast: bool, hidden: torch.Tensor, labels: torch.Tensor,
           weights: torch.Tensor, teacher: torch.Tensor | None) -> torch.Tensor:
    with torch.autocast(hidden.device.type, torch.bfloat16, enabled=autocast):
        logits = model.logits(hidden).float()
    if teacher is None:
        return (weights * torch.nn.functional.cross_entropy(logits, labels, reduction="none")).sum()
    with torch.no_grad():
        target = model.logits(teacher)
    return (weights * law_losses(logits, target, objective.alpha if objective.target == "p_alpha" else 1.0)).sum()


def law_losses(logits: torch.Tensor, target: torch.Tensor, alpha: float) -> torch.Tensor:
    """KL(p_alpha | q) in nats, (n,), of q = softmax(logits) from p_alpha = softmax(alpha · target); both (n, ids).

    p_alpha is the law of a token that p gives, sharpened: p^alpha, normalised token by token. Its minimum, 0, is q = p_alpha.
    """
    log_p = torch.log_softmax(alpha * target, dim=-1)
    # Ids without a token have probability 0 in both, and would give 0 · (-inf + inf).
    ratio = torch.where(torch.isneginf(target), 0.0, log_p - torch.log_softmax(logits, dim=-1))
    return (log_p.exp() * ratio).sum(dim=-1)
