"""Gains of tokens from blending a source's logits into the target's: sums per answer, and rows of tables.

A blend is (1 - beta) * target + beta * source. It is computed for a piece of the answer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.statistics.intervals import Clusters

if TYPE_CHECKING:
    import torch

    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.forcing.answers import Answer
    from dflash_mcmc.forcing.layers import Source, Standing

DRAFT, FLATTENED = "draft", "flattened"
"""Sources that are not layers; a layer is named by its number."""
PARTS = ("hard", "easy")
SUMS = ("n", "gain", "wins", "losses", "rank_wins", "rank_losses", "gain_over_flattened", "wins_over_flattened")
"""Sums over tokens.

`n` counts them. `gain` is log p of the blend minus log p of the target, in nats; `wins` and `losses` count positive and
negative gains. `rank_wins` and `rank_losses` count better and worse ranks. `gain_over_flattened` is log p of the blend minus
log p of the target flattened by the same beta; `wins_over_flattened` counts the tokens for which it is positive.
"""


class Settings(NamedTuple):
    """Decoder layers to blend, the norm applied to them (`none` or `final`), the betas, and the limit for hard tokens."""

    layers: Sequence[int]
    norm: str
    betas: Sequence[float]
    hard_below: float


def record(model: LanguageModel, draft: DFlashDrafter | None, answer: Answer, settings: Settings) -> dict:
    """The record of an answer: `SUMS` over its hard tokens and over its easy tokens, for each source and beta.

    Raises NotNumbers.
    """
    import torch

    from dflash_mcmc.forcing import layers

    tokens = torch.from_numpy(answer.tokens).to(model.device)
    totals: dict[str, torch.Tensor] = {}
    given = {} if draft is None else {DRAFT: layers.draft_source(model, draft, answer)}
    for last, outputs in layers.readings(model, answer, settings.layers):
        sources: dict[str, Source | None] = {str(layer): layers.layer_source(model, states, settings.norm)
                                             for layer, states in outputs.items()}
        sources.update({} if totals else {**given, FLATTENED: None})  # only with the first group of layers
        for piece in layers.pieces(model, len(tokens)):
            for name, found in _of_a_piece(model, last, sources, tokens, piece, settings).items():
                totals[name] = totals.get(name, 0.0) + found
    order = sorted(totals, key=lambda name: (not name.isdecimal(), name == FLATTENED))
    sums = {part: {name: [[float(f"{value:.9g}") for value in cell] for cell in totals[name][number].tolist()]
                   for name in order} for number, part in enumerate(PARTS)}
    return {"num_tokens": len(tokens), "num_hard": int(sums["hard"][FLATTENED][0][0]), "sums": sums}


def _of_a_piece(model: LanguageModel, last: torch.Tensor, sources: dict[str, Source | None], tokens: torch.Tensor,
                piece: slice, settings: Settings) -> dict[str, torch.Tensor]:
    """`SUMS` of each source over a piece of an answer, float64 (parts, betas, sums)."""
    import torch

    from dflash_mcmc.forcing import layers

    tokens, logits = tokens[piece], model.logits(last[piece])
    target = layers.standing(logits, tokens)
    flat = [layers.log_probability(blended(logits, None, beta, model.forbidden), tokens) for beta in settings.betas]
    is_hard = target.log_p < math.log(settings.hard_below)
    found = {}
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
        found[name] = torch.einsum("pt,bst->pbs", parts, torch.stack(cells))
    return found


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


class Blended:
    """The tables of the probe, computed from its records.

    Args:
        records: results of `record`, one per problem.
        betas: the betas of the records.
    """

    def __init__(self, records: list[dict], betas: Sequence[float]):
        self._betas, self._problems = betas, Clusters(range(len(records)))
        self.sources = list(records[0]["sums"]["hard"]) if records else []
        self._sums = {part: {name: np.array([record["sums"][part][name] for record in records]) for name in self.sources}
                      for part in PARTS}

    def table(self, *parts: str) -> list[dict]:
        """A row for each source and beta, with means and shares over the tokens of these parts, and intervals.

        The published claim is about hard tokens. Rows for hard tokens alone also have paired differences.
        """
        return [self._row(name, number, beta, parts) for name in self.sources for number, beta in enumerate(self._betas)]

    def _row(self, name: str, number: int, beta: float, parts: Sequence[str]) -> dict:
        sums = dict(zip(SUMS, np.sum([self._sums[part][name][:, number] for part in parts], axis=0).T, strict=True))
        above = {name: sums[name] for name in ("gain", "wins", "rank_wins", "rank_losses", "gain_over_flattened")}
        if parts == ("hard",):
            above.update({"wins_over_flattened": sums["wins_over_flattened"],
                          "wins_minus_losses": sums["wins"] - sums["losses"],
                          "rank_wins_minus_losses": sums["rank_wins"] - sums["rank_losses"]})
        row = {"source": "layer" if name.isdecimal() else name, "layer": int(name) if name.isdecimal() else None, "beta": beta}
        for column, values in above.items():
            row.update(self._problems.ratio(values, sums["n"]).columns(column))
        return {**row, "n": round(sums["n"].sum())}
