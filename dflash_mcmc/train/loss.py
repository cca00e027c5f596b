"""The training loss of a draft. All blocks of some sequences are drafted in one forward.

Slot k of a block predicts the token k positions after the anchor, from the target's features before the anchor and the
anchor's token. The prediction is compared with the token at that position, or with the target's distribution there. Slot 0,
padding and positions after the end do not count. Slot k has the weight exp(-(k - 1) / gamma), because all slots after a wrong
one are rejected (DFlash, arXiv 2602.06036).

The logits of all ids are most of the work of a step with a real vocabulary: at 49 thousand ids and a draft of 7 million
parameters, three quarters. A step with candidates computes those of the frequent ids of the training responses, of the ids
that occur in the step, and of random others that stand for the rest: sampled softmax (Jean et al. 2015, arXiv 1412.2007,
section 3). The sum of exp(logit) over all ids is estimated without bias, so that the error of the loss has a mean of about
zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from dflash_mcmc.draft.network.dflash import DFlash
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing import sequences
from dflash_mcmc.rng import Key
from dflash_mcmc.train.blocks import Known, TargetReader, TrainingBlocks
from dflash_mcmc.train.responses import Response


class Candidates(NamedTuple):
    """The ids of a step.

    Attributes:
        ids: int64 (n,). The first `num_certain` are different and ascending; the others are random, from outside them.
        num_certain: number of ids that stand for themselves.
        log_weight: log of the number of ids that each random one stands for.
    """

    ids: torch.Tensor
    num_certain: int
    log_weight: float

    def to(self, device: torch.device) -> Candidates:
        """The same candidates on another device."""
        return self._replace(ids=self.ids.to(device))

    def places(self, labels: torch.Tensor) -> torch.Tensor:
        """The places of labels, int64 (rows,), in `ids`. All labels must be among the certain ids."""
        return torch.searchsorted(self.ids[: self.num_certain], labels)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Logits (rows, n) of hidden states (rows, width), with `log_weight` added to those of random ids.

        Args:
            weight: (ids, width), the head's. bias: (ids,), or None.
        """
        logits = torch.nn.functional.linear(hidden, weight[self.ids].to(hidden.dtype)).float()
        if bias is not None:
            logits = logits + bias[self.ids]
        shift = torch.zeros(len(self.ids), device=logits.device)
        shift[self.num_certain :] = self.log_weight
        return logits + shift

    def kl_divergences(self, logits: torch.Tensor, target: torch.Tensor, log_sums: torch.Tensor, power: float) -> torch.Tensor:
        """KL(p | q) in nats, shape (n,): an estimate from the candidates, in which p has no error.

        Args:
            logits: (n, candidates), the draft's, as `logits` returns them.
            target: (n, candidates), the target's logits of the candidates. p is softmax(power · target) over all ids.
            log_sums: (n,), log of the sum of exp(power · logit of the target) over all ids.
        """
        shift = torch.zeros(len(self.ids), device=logits.device)
        shift[self.num_certain :] = self.log_weight
        log_p = power * target - log_sums[:, None]
        log_q = torch.log_softmax(logits, dim=-1) - shift
        return ((log_p + shift).exp() * (log_p - log_q)).sum(dim=-1)


class CandidateIds:
    """The candidates of each step. Step n depends only on the responses, the seed and n, so a resumed run has the same ones.

    Args:
        responses: the training responses.
        num: number of candidates beside the ids of the step. Half of them are the most frequent ids of the answers.
        forbidden: bool (ids,), True for ids without a token, which are never candidates.
    """

    def __init__(self, responses: Sequence[Response], num: int, forbidden: np.ndarray, seed: int):
        answers = np.concatenate([response.tokens[response.prompt_length :] for response in responses])
        counts = np.bincount(answers, minlength=len(forbidden))
        counts[forbidden] = 0
        frequent = np.argsort(-counts, kind="stable")[: num // 2]
        self._frequent, self._forbidden = frequent[counts[frequent] > 0], forbidden
        self._num_random = num - num // 2
        self._key = Key(seed).fold_in("draft", "candidates")

    def __call__(self, step: int, tokens: torch.Tensor) -> Candidates:
        """The candidates of a step with these tokens, int64 of any shape. All tokens are certain candidates."""
        certain = np.union1d(self._frequent, tokens.cpu().numpy())
        outside = ~self._forbidden
        outside[certain] = False
        rest = np.flatnonzero(outside)
        if not len(rest):
            return Candidates(torch.from_numpy(certain), len(certain), 0.0)
        drawn = rest[(self._key.fold_in(step).uniforms(0, self._num_random) * len(rest)).astype(np.int64)]
        ids = torch.from_numpy(np.concatenate([certain, drawn]))
        return Candidates(ids, len(certain), float(np.log(len(rest) / self._num_random)))


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


def weights_of(blocks: TrainingBlocks, num_drafted: int, gamma: float) -> torch.Tensor:
    """exp(-(k - 1) / gamma) of slot k, float32 (rows, blocks, num_drafted); 0 for padding and positions after the end."""
    counts = (blocks.anchors >= 0) * (blocks.lengths[:, None] - 1 - blocks.anchors)
    slots = torch.arange(num_drafted, device=counts.device)
    return (slots < counts[..., None]) * torch.exp(-slots / gamma)


def kl_divergences(logits: torch.Tensor, target: torch.Tensor, alpha: float) -> torch.Tensor:
    """KL(p_alpha | q) in nats, shape (...), with q = softmax(logits) and p_alpha = softmax(alpha · target).

    `logits` and `target` have the shape (..., ids). p_alpha is the target's next-token distribution to the power alpha,
    normalised. The minimum is 0, at q = p_alpha.
    """
    log_p = torch.log_softmax(alpha * target, dim=-1)
    # Ids without a token have probability 0 in both distributions and would give 0 · (-inf + inf).
    ratio = torch.where(torch.isneginf(target), 0.0, log_p - torch.log_softmax(logits, dim=-1))
    return (log_p.exp() * ratio).sum(dim=-1)


def loss_sum(draft: DFlash, model: LanguageModel, blocks: TrainingBlocks, objective: Objective,
             autocast: bool, candidates: Candidates | None = None, known: Known | None = None) -> torch.Tensor:
    """The sum over all slots of weight times loss, in nats.

    Sums over parts of a batch, from several processes, can be added. To get the mean, divide the total by the sum of the
    whole batch's weights.

    Args:
        candidates: the ids to normalise over; None for all ids.
        known: what the target says along the sequences; None reads the target.
    """
    weights = weights_of(blocks, draft.shape.num_drafted, objective.gamma)
    rows, anchors, slots = torch.nonzero(weights, as_tuple=True)
    positions = blocks.anchors[rows, anchors] + slots + 1
    if known is None:
        known = TargetReader(model, draft.shape.target_layers, objective.power, candidates is not None)(blocks.tokens)
    with torch.autocast(blocks.tokens.device.type, torch.bfloat16, enabled=autocast):
        hidden = sequences.drafted(draft, model, known.features, *blocks)[rows, anchors, slots]
    # The target's distribution of a token is computed from the position before it.
    teacher, log_sums = (None if part is None else part[rows, positions - 1] for part in known[1:])
    tokens, weights = blocks.tokens[rows, positions], weights[rows, anchors, slots]
    if candidates is not None and objective.power is not None and log_sums is None:
        raise ValueError("a loss of a distribution over candidates needs the logarithms of the target's sums")
    head = model.head_logits if candidates is None else partial(
        candidates.logits, weight=model.head.weight.detach(), bias=getattr(model.head, "bias", None))

    def piece(part: slice) -> torch.Tensor:
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=autocast):
            logits = head(hidden[part]).float()
        if objective.power is None or teacher is None:
            labels = tokens[part] if candidates is None else candidates.places(tokens[part])
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        elif candidates is None or log_sums is None:
            with torch.no_grad():
                target = model.logits(teacher[part])
            losses = kl_divergences(logits, target, objective.power)
        else:
            with torch.no_grad():
                target = model.logits_of(teacher[part], candidates.ids)
            losses = candidates.kl_divergences(logits, target, log_sums[part], objective.power)
        return (weights[part] * losses).sum()

    pieces = [slice(start, start + _SLOTS_AT_ONCE) for start in range(0, len(hidden), _SLOTS_AT_ONCE)]
    if len(pieces) == 1:
        return piece(pieces[0])
    # The backward pass recomputes the logits. Only the logits of one part are in memory at a time.
    return sum((checkpoint(piece, part, use_reentrant=False) for part in pieces), hidden.sum() * 0.0)
