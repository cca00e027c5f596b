"""Sums over the tokens of an answer: what blends with other sources gain, and how far these agree with the target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.forcing.answers import Answer
    from dflash_mcmc.forcing.layers import Source, Standing
    from dflash_mcmc.settings import BlendPart

DRAFT, BLEND, FLATTENED = "draft", "blend", "flattened"
"""Sources that are not layers; a layer is named by its number."""
PARTS = ("hard", "easy")
SUMS = ("n", "gain", "wins", "losses", "rank_wins", "rank_losses", "gain_over_flattened", "wins_over_flattened")
"""Sums over tokens.

`n` counts them. `gain` is log p of the blend minus log p of the target, in nats; `wins` and `losses` count positive and
negative gains. `rank_wins` and `rank_losses` count better and worse ranks. `gain_over_flattened` is log p of the blend minus
log p of the target flattened by the same beta; `wins_over_flattened` counts the tokens for which it is positive.
"""
AGREEMENT = ("n", "kl", "rank_correlation")
"""Sums over tokens: their number, KL(target, source) in nats, and Spearman's correlation of the vocabulary's two orders."""


class Other(NamedTuple):
    """The chosen blend, the models that it reads beside the target, and their prompts by the bytes of the target's."""
    blend: BlendPart
    companions: list[LanguageModel]
    second: Mapping[bytes, np.ndarray]

    def source(self, model: LanguageModel, answer: Answer, last: torch.Tensor) -> Source:
        """See `forcing.layers.other_source`."""
        from dflash_mcmc.forcing import layers

        return layers.other_source(model, self.blend, self.companions, answer, last, self.second.get(answer.prompt.tobytes()))


class BlendOptions(NamedTuple):
    """Decoder layers to blend, the norm applied to them (`none` or `final`), the betas, and the limit for hard tokens."""
    layers: Sequence[int]
    norm: str
    betas: Sequence[float]
    hard_below: float


def record(model: LanguageModel, draft: DFlashDrafter | None, answer: Answer, settings: BlendOptions,
           other: Other | None = None) -> dict:
    """The record of an answer: `SUMS` over its hard tokens and over its easy tokens, for each source and beta.

    Raises NotNumbers.
    """
    import torch

    from dflash_mcmc.forcing import layers

    tokens = torch.from_numpy(answer.tokens).to(model.device)
    totals: dict[str, torch.Tensor] = {}
    agreement: dict[str, torch.Tensor] = {}
    drafted = {} if draft is None else {DRAFT: layers.draft_source(model, draft, answer)}
    for last, outputs in layers.readings(model, answer, settings.layers):
        sources: dict[str, Source | None] = {str(layer): layers.layer_source(model, states, settings.norm)
                                             for layer, states in outputs.items()}
        if not totals:  # only with the first group of layers
            mixed_in = {} if other is None else {BLEND: other.source(model, answer, last)}
            sources.update({**drafted, **mixed_in, FLATTENED: None})
        for piece in layers.pieces(model, len(tokens)):
            new = _of_a_piece(model, last, sources, tokens, piece, settings)
            for sums, more in zip((totals, agreement), new, strict=True):
                sums.update({name: sums.get(name, 0.0) + value for name, value in more.items()})
    order = sorted(totals, key=lambda name: (not name.isdecimal(), name == FLATTENED))
    rounded = {part: {name: list(map(_rounded, totals[name][number])) for name in order} for number, part in enumerate(PARTS)}
    return {"num_tokens": len(tokens), "num_hard": int(rounded["hard"][FLATTENED][0][0]), "sums": rounded,
            "agreement": {name: _rounded(agreement[name]) for name in order if name in agreement}}


def _rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.9g}") for value in values.tolist()]


def _of_a_piece(model: LanguageModel, last: torch.Tensor, sources: dict[str, Source | None], tokens: torch.Tensor,
                piece: slice, settings: BlendOptions) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """`SUMS` of each source over a piece of an answer, float64 (parts, betas, sums), and `AGREEMENT`, float64 (sums,)."""
    import torch

    from dflash_mcmc.forcing import layers

    tokens, logits = tokens[piece], model.logits(last[piece])
    target = layers.standing(logits, tokens)
    flat = [layers.log_probability(blended(logits, None, beta, model.forbidden), tokens) for beta in settings.betas]
    is_hard = target.log_p < math.log(settings.hard_below)
    summands, agreement = {}, {}
    for name, source in sources.items():
        others = None if source is None else source.head(source.states[piece])
        speaks = torch.ones_like(is_hard) if source is None else source.speaks[piece]
        cells = []
        for beta, flattened in zip(settings.betas, flat, strict=True):
            # Flattening keeps the order of all logits, except for ties from rounding.
            mixed = target._replace(log_p=flattened) if others is None else layers.standing(
                blended(logits, others, beta, model.forbidden), tokens)
            cells.append(_summands(mixed, target, flattened))
        parts = torch.stack([speaks & is_hard, speaks & ~is_hard]).double()
        summands[name] = torch.einsum("pt,bst->pbs", parts, torch.stack(cells))
        if others is not None:
            agreement[name] = agreeing(*(part[speaks & is_hard][:, ~model.forbidden] for part in (logits, others)))
    return summands, agreement


def agreeing(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`AGREEMENT` of two logits (n, vocabulary), float64 (3,). Equal logits of a row are in the order of ids."""
    import torch

    log_p, log_q = (logits.double().log_softmax(dim=-1) for logits in (target, source))
    mine, theirs = (law.argsort(dim=-1, stable=True).argsort(dim=-1).double() for law in (log_p, log_q))
    size = log_p.shape[-1]
    correlation = 1.0 - 6.0 * (mine - theirs).square().sum(dim=-1) / (size * (size**2 - 1.0))
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    return torch.stack([torch.ones_like(kl).sum(), kl.sum(), correlation.sum()])


def blended(target: torch.Tensor, others: torch.Tensor | None, beta: float, forbidden: torch.Tensor) -> torch.Tensor:
    """(1 - beta) * target + beta * others, float32 (n, vocabulary).

    `others` None is the uniform distribution, with all logits 0. The result equals the target to the last bit if beta is 0 or
    if both are equal. Ids without a token keep -inf.
    """
    import torch

    mixed = target * (1.0 - beta) if others is None else torch.lerp(target, others, beta)
    return mixed.masked_fill_(forbidden, -torch.inf)


def _summands(mixed: Standing, target: Standing, flattened: torch.Tensor) -> torch.Tensor:
    """`SUMS` of each token, float64 (sums, n)."""
    import torch

    gain, over = mixed.log_p - target.log_p, mixed.log_p - flattened
    return torch.stack([torch.ones_like(gain), gain, gain > 0, gain < 0, mixed.rank < target.rank, mixed.rank > target.rank,
                        over, over > 0]).double()
