"""The training losses of drafts whose slots depend on the token before: DSpark and DFlash 2.

All slots are computed with the response's tokens as the tokens before them (teacher forcing). Slot k = 1, 2, ... of a block
has the weight exp(-(k - 1) / gamma), as in DFlash.

Sources: DSpark (arXiv 2607.05147) and its trainer DeepSpec; NVIDIA NeMo Automodel for DFlash 2.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from dflash_mcmc.draft.network.dflash2.network import DFlash2
from dflash_mcmc.draft.network.dspark.network import DSpark
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing import sequences
from dflash_mcmc.train.blocks import TrainingBlocks
from dflash_mcmc.train.loss import slot_weights

_CROSS_ENTROPY, _VARIATION, _CONFIDENCE = 0.1, 0.9, 1.0
"""Weights of the terms of DSpark's loss."""
_SLOTS_AT_ONCE = 8192
"""Slots whose logits are in memory at the same time."""


def loss_sum(draft: DSpark | DFlash2, model: LanguageModel, blocks: TrainingBlocks, gamma: float,
             autocast: bool) -> torch.Tensor:
    """The sum over all slots of weight times loss; see `loss.loss_sum`."""
    weights = slot_weights(blocks, draft.shape.num_drafted, gamma)
    rows, anchors = torch.nonzero(weights.sum(dim=-1), as_tuple=True)
    layers = draft.shape.target_layers
    reading = sequences.read(model, blocks.tokens, layers)
    with torch.autocast(blocks.tokens.device.type, torch.bfloat16, enabled=autocast):
        hidden = sequences.drafted(draft, model, reading.features(model, layers), *blocks)[rows, anchors]
    before = blocks.anchors[rows, anchors][:, None] + torch.arange(weights.shape[-1], device=rows.device)
    before = before.clamp(max=blocks.tokens.shape[1] - 2)  # slots after the end have weight 0
    tokens, weights = blocks.tokens[rows], weights[rows, anchors]
    previous, labels = tokens.gather(1, before), tokens.gather(1, before + 1)
    teacher = reading.hidden[rows[:, None], before]
    term = _dspark if isinstance(draft, DSpark) else _dflash2

    def piece(part: slice) -> torch.Tensor:
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=autocast):
            base = model.head_logits(hidden[part]).float()
            logits = draft.along(base, hidden[part], previous[part])
            confidence = draft.confidence_logits(hidden[part], previous[part])
        return (weights[part] * term(base, logits, labels[part], model, teacher[part], confidence)).sum()

    size = max(1, _SLOTS_AT_ONCE // weights.shape[-1])
    parts = [slice(start, start + size) for start in range(0, len(rows), size)]
    if len(parts) == 1:
        return piece(parts[0])
    return sum((checkpoint(piece, part, use_reentrant=False) for part in parts), hidden.sum() * 0.0)


def _dspark(base: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, model: LanguageModel, teacher: torch.Tensor,
            confidence: torch.Tensor | None) -> torch.Tensor:
    """0.1 cross-entropy + 0.9 |p - q| + the confidence's cross-entropy to 1 - |p - q| / 2, for each slot (blocks, n)."""
    with torch.no_grad():
        target = torch.softmax(model.logits(teacher), dim=-1)
    variation = (torch.softmax(logits, dim=-1) - target).abs().sum(dim=-1)
    loss = _CROSS_ENTROPY * _cross_entropy(logits, labels) + _VARIATION * variation
    if confidence is None:
        return loss
    accepted = (1.0 - 0.5 * variation.detach()).clamp(0.0, 1.0)
    return loss + _CONFIDENCE * torch.nn.functional.binary_cross_entropy_with_logits(
        confidence.float(), accepted, reduction="none")


def _dflash2(base: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, model: LanguageModel, teacher: torch.Tensor,
             confidence: torch.Tensor | None) -> torch.Tensor:
    """Cross-entropy of the head's logits + that of the selector where the label is a candidate, for each slot (blocks, n)."""
    among = torch.isfinite(logits.gather(-1, labels[..., None])[..., 0])
    finite = torch.where(torch.isfinite(logits), logits, torch.finfo(logits.dtype).min)
    return _cross_entropy(base, labels) + torch.where(among, _cross_entropy(finite, labels), 0.0)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
