"""Gains of tokens from blending a source's logits into the target's: sums per answer, and rows of tables.

A blend has logits (1 - beta) * target + beta * source. It is computed for a piece of the answer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.columns import SKIPPED, Each, Table
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

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
    drafted = {} if draft is None else {DRAFT: layers.draft_source(model, draft, answer)}
    for last, outputs in layers.readings(model, answer, settings.layers):
        sources: dict[str, Source | None] = {str(layer): layers.layer_source(model, states, settings.norm)
                                             for layer, states in outputs.items()}
        sources.update({} if totals else {**drafted, FLATTENED: None})  # only with the first group of layers
        for piece in layers.pieces(model, len(tokens)):
            for name, sums in _of_a_piece(model, last, sources, tokens, piece, settings).items():
                totals[name] = totals.get(name, 0.0) + sums
    order = sorted(totals, key=lambda name: (not name.isdecimal(), name == FLATTENED))
    rounded = {part: {name: [[float(f"{value:.9g}") for value in cell] for cell in totals[name][number].tolist()]
                      for name in order} for number, part in enumerate(PARTS)}
    return {"num_tokens": len(tokens), "num_hard": int(rounded["hard"][FLATTENED][0][0]), "sums": rounded}


def _of_a_piece(model: LanguageModel, last: torch.Tensor, sources: dict[str, Source | None], tokens: torch.Tensor,
                piece: slice, settings: Settings) -> dict[str, torch.Tensor]:
    """`SUMS` of each source over a piece of an answer, float64 (parts, betas, sums)."""
    import torch

    from dflash_mcmc.forcing import layers

    tokens, logits = tokens[piece], model.logits(last[piece])
    target = layers.standing(logits, tokens)
    flat = [layers.log_probability(blended(logits, None, beta, model.forbidden), tokens) for beta in settings.betas]
    is_hard = target.log_p < math.log(settings.hard_below)
    summands = {}
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
    return summands


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
        self._betas, self.problems = betas, Clusters(range(len(records)))
        self.sources = list(records[0]["sums"]["hard"]) if records else []
        self.sums = {part: {name: np.array([record["sums"][part][name] for record in records]) for name in self.sources}
                      for part in PARTS}

    def rows(self, table: Table, *parts: str) -> list[dict]:
        """A row for each source and beta, over the tokens of these parts."""
        return table.rows(Blend(self, name, beta, np.sum([self.sums[part][name][:, number] for part in parts], axis=0))
                          for name in self.sources for number, beta in enumerate(self._betas))


class Blend:
    """A source and a beta: the sums of each problem over some of its tokens."""

    def __init__(self, of: Blended, name: str, beta: float, sums: np.ndarray):
        self.source = "layer" if name.isdecimal() else name
        self.layer = int(name) if name.isdecimal() else None
        self.beta, self._problems = beta, of.problems
        self.sums = dict(zip(SUMS, sums.T, strict=True))

    def mean(self, gained: str, lost: str | None = None) -> IntervalEstimate:
        """The mean of one of `SUMS` over the tokens, or of the difference of two."""
        above = self.sums[gained] if lost is None else self.sums[gained] - self.sums[lost]
        return self._problems.ratio(above, self.sums["n"])


_ROWS = (
    ("source", "what is blended: `layer` (the head on a layer's output), `draft`, or `flattened` (all logits 0), the control",
     lambda blend: blend.source),
    ("layer", "number of the layer, from 0", lambda blend: blend.layer),
    ("beta", "share of the source in the blend", lambda blend: blend.beta),
    ("gain", "mean of log p under the blend minus log p under the target, nats", lambda blend: blend.mean("gain")),
    ("wins", "share of tokens whose log p is larger under the blend", lambda blend: blend.mean("wins")),
    ("rank_wins", "share of tokens whose rank is better under the blend", lambda blend: blend.mean("rank_wins")),
    ("rank_losses", "share of tokens whose rank is worse under the blend", lambda blend: blend.mean("rank_losses")),
    ("gain_over_flattened", "mean of log p under the blend minus log p under the flattened target with this beta, nats",
     lambda blend: blend.mean("gain_over_flattened")),
)
_N = ("n", "tokens of the row", lambda blend: round(blend.sums["n"].sum()))
GRID, EASY = Table("grid", (*_ROWS, _N)), Table("easy", (*_ROWS, _N))
HARD = Table("hard", (  # The published claim is about hard tokens. These rows have paired differences, too.
    *_ROWS,
    ("wins_over_flattened", "share of tokens whose log p is larger under the blend than under the flattened target",
     lambda blend: blend.mean("wins_over_flattened")),
    ("wins_minus_losses", "share of wins minus share of losses in log p", lambda blend: blend.mean("wins", "losses")),
    ("rank_wins_minus_losses", "share of better ranks minus share of worse ranks",
     lambda blend: blend.mean("rank_wins", "rank_losses")),
    _N,
))


class Result(NamedTuple):
    """All records, and the rows of the table `hard`."""

    records: list[dict]
    hard: list[dict]

    def total(self, count: str) -> int:
        """The sum of a count over the measured records."""
        return sum(record[count] for record in self.records if "skipped" not in record)

    def best(self) -> dict[str, dict]:
        """The row with the largest gain among the sources, `best`, and among those of the control; empty without tokens."""
        rows = [row for row in self.hard if row["gain"] is not None]
        return {name: max((row for row in rows if (row["source"] == FLATTENED) == control), key=lambda row: row["gain"],
                          default={}) for name, control in (("best", False), (FLATTENED, True))}


def _source(row: dict) -> str | None:
    return None if not row else row["source"] if row["layer"] is None else f"layer {row['layer']}"


VALUES = Table("values", (
    SKIPPED,
    ("num_tokens", "tokens of all answers", lambda result: result.total("num_tokens")),
    ("num_hard", "hard tokens", lambda result: result.total("num_hard")),
    Each(lambda result: result.best(), (
        ("{which}/source", "source with the largest `gain` on hard tokens, chosen on these tokens: `best`, or always "
                           "`flattened`", lambda _, row: _source(row)),
        ("{which}/beta", "beta of the best setting of this source", lambda _, row: row.get("beta")),
        ("{which}/gain", "its `gain` on hard tokens, nats", lambda _, row: row.get("gain")),
        ("{which}/wins", "its `wins` on hard tokens, share", lambda _, row: row.get("wins")),
        ("{which}/wins_over_flattened", "its `wins_over_flattened` on hard tokens, share",
         lambda _, row: row.get("wins_over_flattened")),
    )),
))
ALL = (VALUES, GRID, HARD, EASY)


def summary(records: list[dict], betas: Sequence[float]) -> Summary:
    """The tables `grid` (for all tokens), `hard` and `easy`, with a row per source and beta.

    A gain is the mean of log p of the blend minus log p of the target, in nats. A win is a token for which the blend's log p
    is strictly larger. The source `best` is chosen on the same hard tokens for which it is reported, so it looks better than
    it is.
    """
    blended = Blended([record for record in records if "skipped" not in record], betas)
    tables = {"grid": blended.rows(GRID, *PARTS), "hard": blended.rows(HARD, "hard"), "easy": blended.rows(EASY, "easy")}
    return Summary(VALUES.row(Result(records, tables["hard"])), tables, {})
