"""The tables of the mixing probe: moves, convergence, log ratios and cost of each cell, which is one setting of the grid.

Each row is for one cell and begins with its setting. Intervals are clustered by problem. A value without data is None.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.columns import Each, Table
from dflash_mcmc.probe.mixing.chains import COSTS, WINDOWS, Cell, CellConvergence, CellEss, StepChain, Steps, lags
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

CUT_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Bins of the relative cut position, cut / length."""
LENGTH_EDGES = (1, 5, 9, 17, 33, 65)
"""First length of each bin of suffix lengths; the last bin is open."""
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
RATIO_EDGES = tuple(sign * size for sign, sizes in ((-1.0, (100, 30, 10, 3, 1, 0.3, 0.1, 0.03, 0.01)),
                                                   (1.0, (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100))) for size in sizes)
"""Edges of the bins of log ratios, in nats; the outermost bins are open."""
NUM_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of steps for which `moves` has a row, if chains are long enough."""
SHOWN = "last_half"
"""Window of steps that the summary and the figures show."""
_PRINTED_LAGS = (1, 2, 4, 8, 16)

_SETTING = (
    ("alpha", "power of the target, p^alpha", lambda row: row.cell.alpha),
    ("temperature", "temperature of the proposal", lambda row: row.cell.temperature),
    ("early_reject", "`sampler.early_reject`", lambda row: row.cell.early_reject),
)


class Proposals:
    """Some steps of a cell.

    Args:
        label: what the row is named by.
        among: bool (steps,); None for all.
    """

    def __init__(self, cell: Cell, steps: Steps, label: str = "", among: np.ndarray | None = None):
        self.cell, self.label, self._among = cell, label, among
        self.steps, self.clusters = steps, Clusters(steps.problem)

    def share(self, selected: np.ndarray) -> IntervalEstimate:
        """Share of the steps that are selected, too."""
        return self.clusters.mean(selected, self._among)


_ACCEPTANCE = ("acceptance", "share of proposals that are accepted", lambda row: row.share(row.steps.accepted))
_MOVED = ("moved_rate", "share of proposals that are accepted and differ from the state",
          lambda row: row.share(row.steps.moved))
_ABANDONED = ("abandoned", "share of proposals that early rejection ends", lambda row: row.share(row.steps.abandoned))
_RATES = (_ACCEPTANCE, _MOVED, _ABANDONED, ("proposals", "proposals of the row", lambda row: row.share(row.steps.accepted).n))


def _chains(row: Any) -> Clusters:
    return Clusters([chain.problem for chain in row.cell.chains])


CELLS = Table("cells", (
    *_SETTING, _ACCEPTANCE, _MOVED,
    ("identical", "share of proposals that equal the state", lambda row: row.share(row.steps.identical)),
    _ABANDONED,
    ("log_p", "mean log p of the chains' last states, nats",
     lambda row: _chains(row).mean([chain.last_log_p for chain in row.cell.chains])),
    ("proposals", "proposals of the row", lambda row: row.clusters.size),
    ("chains", "chains of the cell", lambda row: _chains(row).size),
    ("problems", "problems of the cell", lambda row: _chains(row).number),
    ("failed", "chains that could not be drawn", lambda row: row.cell.num_failed),
))
BY_CUT = Table("by_cut", (
    *_SETTING, ("cut", "range of the cut's place divided by the length of the state", lambda row: row.label), *_RATES))
BY_LENGTH = Table("by_length", (
    *_SETTING, ("suffix", "range of the number of tokens of the state that are drawn again", lambda row: row.label), *_RATES))


def by_cut(cell: Cell) -> list[dict]:
    """Rates by the relative position of the cut. Cuts after the end of the sequence propose nothing and are left out."""
    steps = cell.steps()
    relative = steps.cut / np.maximum(steps.length, 1)
    return BY_CUT.rows(Proposals(cell, steps, f"{low:g}-{high:g}", (relative >= low) & (relative < high))
                       for low, high in itertools.pairwise(CUT_EDGES))


def by_length(cell: Cell) -> list[dict]:
    """Rates by the number of redrawn tokens of the state. Unlike the proposal's length, it is known before the draw."""
    steps = cell.steps()
    suffix, ends = steps.length - steps.cut, [*(edge - 1 for edge in LENGTH_EDGES[1:]), None]
    return BY_LENGTH.rows(
        Proposals(cell, steps, f"{low}+" if high is None else f"{low}-{high}",
                  (suffix >= low) & (suffix <= (np.inf if high is None else high)))
        for low, high in zip(LENGTH_EDGES, ends, strict=True))


class Spent:
    """The cost of a cell. The full length of an abandoned proposal is unknown here; see `EARLY_REJECTION`."""

    def __init__(self, cell: Cell):
        self.cell, self.steps, self.chains = cell, cell.steps(), Clusters([chain.problem for chain in cell.chains])
        self.of = {name: np.array([chain.cost[name] for chain in cell.chains], float) for name in COSTS}

    def tokens(self, among: np.ndarray) -> IntervalEstimate:
        """Mean tokens of some proposals."""
        return Clusters(self.steps.problem).mean(self.steps.proposal_length - self.steps.cut, among)

    @property
    def complete(self) -> IntervalEstimate:
        """Mean tokens of a complete proposal."""
        return self.tokens(self.steps.real & ~self.steps.abandoned)

    @property
    def skipped(self) -> IntervalEstimate:
        """Share of tokens that needed no target forward."""
        return self.chains.ratio(self.of["tokens_skipped"], self.of["tokens_skipped"] + self.of["tokens_drawn"])


COST = Table("cost", (
    *_SETTING,
    ("complete_tokens", "mean tokens of a complete proposal", lambda row: row.complete),
    ("complete", "complete proposals", lambda row: row.complete.n),
    ("abandoned_tokens", "mean tokens of an abandoned proposal until its end", lambda row: row.tokens(row.steps.abandoned)),
    ("abandoned", "abandoned proposals", lambda row: row.tokens(row.steps.abandoned).n),
    ("skipped_share", "share of tokens that are taken from the state without the target", lambda row: row.skipped),
    ("tokens", "tokens that this share is over", lambda row: row.skipped.n),
    ("token_forwards", "mean positions that the target evaluates for a chain",
     lambda row: row.chains.mean(row.of["token_forwards"])),
    ("target_forwards", "mean forward passes of the target for a chain",
     lambda row: row.chains.mean(row.of["target_forwards"])),
    ("chains", "chains of the cell", lambda row: row.chains.size),
))


class LogRatios(NamedTuple):
    """The log ratios of some proposals."""

    cell: Cell
    steps: Steps
    label: str
    kept: np.ndarray

    def percentiles(self) -> dict[str, IntervalEstimate]:
        """The percentiles in `LEVELS`."""
        clusters = Clusters([self.steps.problem[index] for index in np.flatnonzero(self.kept)])
        estimates = clusters.quantiles(self.steps.log_ratio[self.kept], LEVELS)
        return {f"{100 * level:g}": estimate for level, estimate in zip(LEVELS, estimates, strict=True)}


LOG_RATIOS = Table("log_ratios", (
    *_SETTING,
    ("proposals", "which proposals: complete ones, complete ones that differ from the state, or all, where an abandoned one "
                  "counts with its upper bound", lambda row: row.label),
    Each(lambda row: row.percentiles(), (
        ("P{level}", "percentile of the log acceptance ratio, nats", lambda _, estimate: estimate),)),
    ("n", "proposals of the row", lambda row: int(row.kept.sum())),
    ("abandoned", "abandoned proposals among them", lambda row: int((row.kept & row.steps.abandoned).sum())),
))


def log_ratios(cell: Cell) -> list[dict]:
    """Quantiles of the log ratio in nats, for three sets of proposals.

    Early rejection removes low values from the first two sets and overstates values in the third. The true quantiles are
    therefore at or below the reported ones.
    """
    steps = cell.steps()
    return LOG_RATIOS.rows(LogRatios(cell, steps, name, kept) for name, kept in (
        ("complete", steps.real & ~steps.abandoned), ("complete, different", ~steps.abandoned & ~steps.identical),
        ("all, abandoned at their bound", steps.real)))


class RatioBin(NamedTuple):
    """A bin of the histogram of log ratios; None for an open end."""

    cell: Cell
    low: float | None
    high: float | None
    counts: Mapping[str, int]


LOG_RATIO_COUNTS = Table("log_ratio_counts", (
    *_SETTING,
    ("low", "lower end of the bin of log acceptance ratios, nats; empty for the open end", lambda row: row.low),
    ("high", "upper end of the bin", lambda row: row.high),
    ("identical", "proposals that equal the state", lambda row: row.counts["identical"]),
    ("different", "complete proposals that differ from the state", lambda row: row.counts["different"]),
    ("abandoned", "abandoned proposals, at their upper bound", lambda row: row.counts["abandoned"]),
))


def log_ratio_counts(cell: Cell) -> list[dict]:
    """Histogram of the log ratio, in nats."""
    steps = cell.steps()
    bin_of = np.searchsorted(RATIO_EDGES, steps.log_ratio, side="right")
    kinds = {"identical": steps.real & steps.identical, "different": ~steps.abandoned & ~steps.identical,
             "abandoned": steps.abandoned}
    counts = {name: np.bincount(bin_of[kept], minlength=len(RATIO_EDGES) + 1) for name, kept in kinds.items()}
    ends = zip([None, *RATIO_EDGES], [*RATIO_EDGES, None], strict=True)
    return LOG_RATIO_COUNTS.rows(RatioBin(cell, low, high, {name: int(of[index]) for name, of in counts.items()})
                                 for index, (low, high) in enumerate(ends))


class LastSteps:
    """The last n steps of the chains that have them, and a number of moves."""

    def __init__(self, cell: Cell, chains: list[StepChain], n: int, least: int):
        self.cell, self.n, self.least, self.clusters = cell, n, least, Clusters([chain.problem for chain in chains])
        self.moved, self.accepted = (np.array([getattr(chain, name)[-n:].sum() for chain in chains])
                                     for name in ("moved", "accepted"))


# `by_acceptance` is P(Binomial(n, a) >= 1 or 3) with the mean acceptance a of these steps, 1 - (1 - a)^n for one move.
# If `share` differs from `by_moved_rate`, chains differ from each other or the steps of a chain are not independent.
MOVES = Table("moves", (
    *_SETTING,
    ("steps", "number n of last steps of a chain", lambda row: row.n),
    ("at_least", "number of moves", lambda row: row.least),
    ("share", "share of chains with at least so many moves in these steps",
     lambda row: row.clusters.mean(row.moved >= row.least)),
    ("by_acceptance", "the share if each of n independent steps moved with the mean acceptance",
     lambda row: independent_moves(row.clusters, row.accepted, row.n, row.least)),
    ("by_moved_rate", "the share if each of n independent steps moved with the mean moved rate",
     lambda row: independent_moves(row.clusters, row.moved, row.n, row.least)),
    ("chains", "chains with at least n steps", lambda row: row.clusters.size),
))


def moves(cell: Cell) -> list[dict]:
    """The shares of chains that move at least once and at least three times in their last n steps."""
    long = {n: [chain for chain in cell.chains if chain.num_steps >= n] for n in NUM_STEPS}
    return MOVES.rows(LastSteps(cell, chains, n, least)
                      for n, chains in long.items() if chains for least in (1, 3) if n >= least)


def independent_moves(clusters: Clusters, hits: np.ndarray, n: int, least: int) -> IntervalEstimate:
    """P(Binomial(n, rate) >= least), with rate = the sum of hits, float64 (chains,), over n steps per chain."""
    from scipy.stats import binom

    return clusters.statistic(lambda weights: binom.sf(least - 1, n, weights @ hits / (n * weights.sum(axis=1))))


class Saving:
    """A cell with early rejection and the same cell without it.

    The chains of a pair use the same uniforms. With exact early rejection they make the same decisions, and the difference in
    cost is the saving.
    """

    def __init__(self, cell: Cell, other: Cell):
        partner = {(chain.problem, chain.number): chain for chain in other.chains}
        self.cell, self.pairs = cell, [(chain, partner[key]) for chain in cell.chains
                                       if (key := (chain.problem, chain.number)) in partner]
        self.clusters = Clusters([chain.problem for chain, _ in self.pairs])

    def ratio(self, name: str) -> IntervalEstimate:
        """A cost divided by that without early rejection."""
        return self.clusters.ratio(*([pair[side].cost[name] for pair in self.pairs] for side in (0, 1)))


EARLY_REJECTION = Table("early_rejection", (
    *_SETTING,
    ("tokens_drawn", "drawn tokens, divided by those of the same cell without early rejection",
     lambda row: row.ratio("tokens_drawn")),
    ("token_forwards", "the same for positions that the target evaluates", lambda row: row.ratio("token_forwards")),
    ("target_forwards", "the same for forward passes of the target", lambda row: row.ratio("target_forwards")),
    ("same", "share of chains whose steps all agree with those without early rejection",
     lambda row: row.clusters.mean([np.array_equal(one.accepted, other.accepted) and np.array_equal(one.moved, other.moved)
                                       for one, other in row.pairs])),
    ("chains", "pairs of chains", lambda row: row.clusters.size),
))


def early_rejection(every: Sequence[Cell]) -> list[dict]:
    """Cost of cells with early rejection relative to the same cells without it. Empty if no such pair exists."""
    plain = {(cell.alpha, cell.temperature): cell for cell in every if cell.early_reject == "off"}
    return EARLY_REJECTION.rows(Saving(cell, plain[cell.alpha, cell.temperature]) for cell in every
                                if cell.early_reject != "off" and (cell.alpha, cell.temperature) in plain)


_WINDOW = (
    ("window", "steps that count: `all`, `last_half`, or `last_stage` (the last stage of the sampler)",
     lambda row: row.window),
    ("fewest_steps", "smallest number of steps of a chain in the window", lambda row: min(row.steps, default=None)),
    ("most_steps", "largest number of steps of a chain in the window", lambda row: max(row.steps, default=None)),
)
_PROBLEMS = ("problems", "problems whose chains have enough steps", lambda row: row.clusters.size)
_TOO_SHORT = ("too_short", "problems that are left out because their chains have too few steps", lambda row: row.too_short)
CONVERGENCE = Table("convergence", (
    *_SETTING, *_WINDOW,
    ("stuck", "share of chains that keep one state in the window", lambda row: row.stuck),
    ("chains", "chains in the window", lambda row: row.stuck.n),
    ("all_stuck", "share of problems whose chains are all stuck",
     lambda row: row.clusters.mean([of.stuck == of.chains for of in row.long.values()])),
    _PROBLEMS,
    ("rhat", "median over problems of the rank-normalised split R-hat of log p; 1 means that the chains agree",
     lambda row: row.median_rhat),
    Each(lambda row: {"1.01": 1.01, "1.1": 1.1}, (
        ("rhat_above_{limit}", "share of problems whose R-hat is larger",
         lambda row, limit: row.defined.mean(row.rhats > limit)),
        ("independent_above_{limit}", "this share for independent draws in equally few chains and steps",
         lambda row, limit: row.independent_above(limit)),
    )),
    ("rhat_infinite", "share of problems whose chains have no variance within and some between",
     lambda row: row.defined.mean(np.isinf(row.rhats))),
    ("rhat_problems", "problems whose R-hat is defined", lambda row: row.defined.size),
    _TOO_SHORT,
))
EFFECTIVE_SAMPLES = Table("effective_samples", (
    *_SETTING, *_WINDOW,
    ("ess_per_step", "effective sample size of log p (bulk ESS) divided by the steps of all chains",
     lambda row: row.per_step),
    ("ess_per_1000_token_forwards", "effective sample size for 1,000 token-forwards of the whole chains",
     lambda row: row.per_1000_token_forwards),
    _PROBLEMS, _TOO_SHORT,
))
_LAGS = (
    *_SETTING,
    ("window", "as in `convergence`", lambda row: row.window),
    ("lag", "distance of two steps", lambda row: row.lag),
    ("autocorrelation", "mean autocorrelation of log p at this lag, over chains that move",
     lambda row: row.clusters.mean(row.values)),
    ("independent", "value for independent draws in chains of this length", lambda row: row.independent),
    ("chains", "chains that move", lambda row: row.clusters.size),
    ("stuck", "chains that keep one state in the window and have no autocorrelation", lambda row: row.stuck),
)
AUTOCORRELATION, BY_LAG = Table("autocorrelation", _LAGS), Table("autocorrelation_by_lag", _LAGS)


class MixingResult(NamedTuple):
    """All cells, and the rows of the tables."""

    cells: Sequence[Cell]
    tables: Mapping[str, list[dict]]

    def shown(self, table: str) -> dict[str, dict]:
        """The row of each cell in the shown window. If there are several cells, the names begin with their settings."""
        rows = [row for row in self.tables[table] if row.get("window", SHOWN) == SHOWN]
        return {f"alpha={row['alpha']:g}/temperature={row['temperature']:g}/{row['early_reject']}/"
                if len(rows) > 1 else "": row for row in rows}


VALUES = Table("values", (
    ("num_cells", "settings of the grid", lambda result: len(result.cells)),
    ("num_failed", "chains that could not be drawn", lambda result: sum(cell.num_failed for cell in result.cells)),
    Each(lambda result: result.shown("cells"), (
        ("{cell}acceptance", "see `cells`; of several cells, the name begins with one: `alpha=4/temperature=0.25/off/rhat`",
         lambda _, row: row["acceptance"]),
        ("{cell}moved_rate", "see `cells`", lambda _, row: row["moved_rate"]),
    )),
    Each(lambda result: result.shown("convergence"), tuple(
        (f"{{cell}}{name}", "see `convergence`, for the last half of the steps", lambda _, row, name=name: row[name])
        for name in ("stuck", "rhat", "rhat_above_1.1"))),
    Each(lambda result: result.shown("effective_samples"), (
        ("{cell}ess_per_1000_token_forwards", "see `effective_samples`, for the last half of the steps",
         lambda _, row: row["ess_per_1000_token_forwards"]),)),
))
ALL = (VALUES, CELLS, CONVERGENCE, EFFECTIVE_SAMPLES, AUTOCORRELATION, BY_CUT, BY_LENGTH, LOG_RATIOS, MOVES, COST,
       EARLY_REJECTION, BY_LAG, LOG_RATIO_COUNTS)


def summary(cells: Sequence[Cell]) -> Summary:
    """Tables of moves, cost, convergence and log ratios by cell. The values are for the last half of each cell's steps."""
    windows = [(cell, name) for cell in cells for name in WINDOWS]
    every_lag = [lag for pair in windows for lag in lags(*pair)]
    tables = {
        "cells": CELLS.rows(Proposals(cell, cell.steps()) for cell in cells),
        "convergence": CONVERGENCE.rows(CellConvergence(*pair) for pair in windows),
        "effective_samples": EFFECTIVE_SAMPLES.rows(CellEss(*pair) for pair in windows),
        "autocorrelation": AUTOCORRELATION.rows(lag for lag in every_lag
                                                if lag.window == SHOWN and lag.lag in _PRINTED_LAGS),
        "by_cut": [row for cell in cells for row in by_cut(cell)],
        "by_length": [row for cell in cells for row in by_length(cell)],
        "log_ratios": [row for cell in cells for row in log_ratios(cell)],
        "moves": [row for cell in cells for row in moves(cell)],
        "cost": COST.rows(map(Spent, cells)),
    }
    if saved := early_rejection(cells):
        tables["early_rejection"] = saved
    return Summary(VALUES.row(MixingResult(cells, tables)), tables, {
        "autocorrelation_by_lag": BY_LAG.rows(every_lag),
        "log_ratio_counts": [row for cell in cells for row in log_ratio_counts(cell)]})
