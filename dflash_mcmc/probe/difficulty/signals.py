"""Signals of each token's difficulty: the disagreement of draft and target, and signals that need no draft.

p is the target's distribution of the token at temperature 1. q is the draft's distribution in one forward per block, given the
anchor and the target's features of all positions before it. All signals are larger for harder tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.forcing import sequences

DRAFT = ("kl_target_draft", "kl_draft_target", "total_variation", "minus_log_acceptance", "draft_entropy", "draft_surprisal",
         "top1_disagreement")
"""KL(p || q), KL(q || p), 1 - expected acceptance, -log expected acceptance, H(q), -log q(token), argmax p is not argmax q.

Expected acceptance is the probability that rejection sampling accepts a token drawn from q. It is the sum of min(p, q), which
is one minus the total variation. The sum of the logarithms over tokens is the logarithm of the product of the tokens' expected
acceptances. All signals are in nats except total variation and top-1 disagreement.
"""
TARGET = ("target_entropy", "target_surprisal", "least_confidence")
"""Signals without a draft: H(p), -log p(token) in nats, 1 - max p (Settles 2009, "Active learning literature survey")."""


@torch.no_grad()
def along(model: LanguageModel, drafter: DFlashDrafter, prompt: np.ndarray, answer: np.ndarray) -> dict[str, np.ndarray]:
    """Signals, float64 (n,) for each name of DRAFT and TARGET, of the drafted slots in an answer's whole blocks.

    The draft does not predict anchors or the tail.

    Args:
        prompt, answer: token ids, int64; the answer is at least a block long.
    """
    tokens = torch.from_numpy(np.concatenate([prompt, answer])).to(model.device)
    block_size = drafter.num_drafted + 1
    anchors = torch.tensor(sequences.whole_blocks(len(prompt), len(answer), block_size), device=model.device)
    reading = sequences.read(model, tokens[None], drafter.tapped_layers)
    drafted = sequences.drafted_along(drafter, reading, tokens, anchors).flatten(0, 1)
    positions = (anchors[:, None] + torch.arange(1, block_size, device=model.device)).flatten()
    before, step = reading.hidden[0, positions - 1], sequences.positions_at_once(model.vocab_size)
    pieces = [of_tokens(model.logits(before[start : start + step]), drafter.logits(drafted[start : start + step]),
                        tokens[positions[start : start + step]]) for start in range(0, len(positions), step)]
    return {name: torch.cat([piece[name] for piece in pieces]).double().cpu().numpy() for name in (*DRAFT, *TARGET)}


def of_tokens(target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Signals of tokens int64 (n,), each float32 (n,), from logits of target and draft, float32 (n, vocabulary).

    Ids without a token have logits -inf in both.
    """
    log_p, log_q = target.log_softmax(dim=-1), draft.log_softmax(dim=-1)
    p, q = log_p.exp(), log_q.exp()
    acceptance = torch.minimum(p, q).sum(dim=-1)
    chosen = tokens[:, None]
    return {
        "kl_target_draft": _mean(p, log_p - log_q).clamp(min=0.0),
        "kl_draft_target": _mean(q, log_q - log_p).clamp(min=0.0),
        "total_variation": 0.5 * (p - q).abs().sum(dim=-1),
        "minus_log_acceptance": -acceptance.log().clamp(max=0.0),
        "draft_entropy": -_mean(q, log_q),
        "draft_surprisal": -log_q.gather(1, chosen)[:, 0],
        "top1_disagreement": (target.argmax(dim=-1) != draft.argmax(dim=-1)).float(),
        "target_entropy": -_mean(p, log_p),
        "target_surprisal": -log_p.gather(1, chosen)[:, 0],
        "least_confidence": 1.0 - p.amax(dim=-1),
    }


def _mean(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Mean of values under weights, (n, vocabulary) each: (n,). A weight of 0 adds nothing, even if the value is infinite."""
    return torch.where(weights > 0, weights * values, 0.0).sum(dim=-1)
