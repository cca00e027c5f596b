"""The tables of the mixing probe: acceptance and moves by cut and by length, log ratios, and cost.

Each row is for one cell and begins with its setting. Intervals are clustered by problem. A value without data is None.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from dflash_mcmc.probe.mixing.chains import COSTS, Cell, StepChain, Steps
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


def cells(cell: Cell) -> dict:
    """Shares of steps that accept, move, change nothing or abandon their proposal, and mean log p of the final states."""
    steps, chains = cell.steps(), Clusters([chain.problem for chain in cell.chains])
    clusters = Clusters(steps.problem)
    return {**cell.setting,
            **clusters.mean(steps.accepted).columns("acceptance"), **clusters.mean(steps.moved).columns("moved_rate"),
            **clusters.mean(steps.identical).columns("identical"), **clusters.mean(steps.abandoned).columns("abandoned"),
            **chains.mean([chain.last_log_p for chain in cell.chains]).columns("log_p"),
            "proposals": clusters.size, "chains": chains.size, "problems": chains.number, "failed": cell.num_failed}


def cost(cell: Cell) -> dict:
    """Tokens of complete and of abandoned proposals, share of tokens that needed no target forward, and forwards per chain.

    The full length of an abandoned proposal is unknown here; see `early_rejection`.
    """
    steps, chains = cell.steps(), Clusters([chain.problem for chain in cell.chains])
    clusters, tokens = Clusters(steps.problem), steps.proposal_length - steps.cut
    complete = clusters.mean(tokens, steps.real & ~steps.abandoned)
    abandoned = clusters.mean(tokens, steps.abandoned)
    spent = {name: np.array([chain.cost[name] for chain in cell.chains], float) for name in COSTS}
    skipped = chains.ratio(spent["tokens_skipped"], spent["tokens_skipped"] + spent["tokens_drawn"])
    return {**cell.setting,
            **complete.columns("complete_tokens"), "complete": complete.n,
            **abandoned.columns("abandoned_tokens"), "abandoned": abandoned.n,
            **skipped.columns("skipped_share"), "tokens": skipped.n,
            **chains.mean(spent["token_forwards"]).columns("token_forwards"),
            **chains.mean(spent["target_forwards"]).columns("target_forwards"), "chains": chains.size}


def by_cut(cell: Cell) -> list[dict]:
    """Rates by the relative position of the cut. Cuts after the end of the sequence propose nothing and are left out."""
    steps = cell.steps()
    relative = steps.cut / np.maximum(steps.length, 1)
    return [{**cell.setting, "cut": f"{low:g}-{high:g}", **_rates(steps, (relative >= low) & (relative < high))}
            for low, high in itertools.pairwise(CUT_EDGES)]


def by_length(cell: Cell) -> list[dict]:
    """Rates by the number of redrawn tokens of the state. Unlike the proposal's length, it is known before the draw."""
    steps = cell.steps()
    suffix, ends = steps.length - steps.cut, [*(edge - 1 for edge in LENGTH_EDGES[1:]), None]
    return [{**cell.setting, "suffix": f"{low}+" if high is None else f"{low}-{high}",
             **_rates(steps, (suffix >= low) & (suffix <= (np.inf if high is None else high)))}
            for low, high in zip(LENGTH_EDGES, ends, strict=True)]


def _rates(steps: Steps, among: np.ndarray) -> dict:
    clusters = Clusters(steps.problem)
    acceptance = clusters.mean(steps.accepted, among)
    return {**acceptance.columns("acceptance"), **clusters.mean(steps.moved, among).columns("moved_rate"),
            **clusters.mean(steps.abandoned, among).columns("abandoned"), "proposals": acceptance.n}


def log_ratios(cell: Cell) -> list[dict]:
    """Quantiles of the log ratio in nats, for three sets of proposals.

    The sets are complete proposals, complete proposals that differ from the state, and all proposals. In the third set an
    abandoned proposal counts with its upper bound. Early rejection removes low values from the first two sets and overstates
    values in the third. The true quantiles are therefore at or below the reported ones.
    """
    steps = cell.steps()
    kinds = {"complete": steps.real & ~steps.abandoned, "complete, different": ~steps.abandoned & ~steps.identical,
             "all, abandoned at their bound": steps.real}
    rows = []
    for name, kept in kinds.items():
        clusters = Clusters([steps.problem[place] for place in np.flatnonzero(kept)])
        found = clusters.quantiles(steps.log_ratio[kept], LEVELS)
        columns = [estimate.columns(f"P{100 * level:g}") for level, estimate in zip(LEVELS, found, strict=True)]
        rows.append({**cell.setting, "proposals": name, **{key: value for part in columns for key, value in part.items()},
                     "n": clusters.size, "abandoned": int((kept & steps.abandoned).sum())})
    return rows


def log_ratio_counts(cell: Cell) -> list[dict]:
    """Histogram of the log ratio, in nats. `low` and `high` are None for the open ends.

    It counts proposals equal to the state, complete ones that differ, and abandoned ones at their upper bounds.
    """
    steps = cell.steps()
    place = np.searchsorted(RATIO_EDGES, steps.log_ratio, side="right")
    kinds = {"identical": steps.real & steps.identical, "different": ~steps.abandoned & ~steps.identical,
             "abandoned": steps.abandoned}
    counts = {name: np.bincount(place[kept], minlength=len(RATIO_EDGES) + 1) for name, kept in kinds.items()}
    ends = zip([None, *RATIO_EDGES], [*RATIO_EDGES, None], strict=True)
    return [{**cell.setting, "low": low, "high": high, **{name: int(found[number]) for name, found in counts.items()}}
            for number, (low, high) in enumerate(ends)]


def moves(cell: Cell) -> list[dict]:
    """The shares of chains that move at least once and at least three times in their last n steps.

    Two columns give the share for independent steps. `by_acceptance` uses the mean acceptance a of these steps:
    P(Binomial(n, a) >= 1 or 3), which is 1 - (1 - a)^n for one move. `by_moved_rate` uses the moved rate instead. If the share
    differs from `by_moved_rate`, chains differ from each other or the steps of a chain are not independent.
    """
    rows = []
    for n in NUM_STEPS:
        chains = [chain for chain in cell.chains if chain.num_steps >= n]
        if not chains:
            break
        clusters = Clusters([chain.problem for chain in chains])
        moved, accepted = (np.array([getattr(chain, name)[-n:].sum() for chain in chains]) for name in ("moved", "accepted"))
        rows += [{**cell.setting, "steps": n, "at_least": least, **clusters.mean(moved >= least).columns("share"),
                  **independent_moves(clusters, accepted, n, least).columns("by_acceptance"),
                  **independent_moves(clusters, moved, n, least).columns("by_moved_rate"), "chains": clusters.size}
                 for least in (1, 3) if n >= least]
    return rows


def independent_moves(clusters: Clusters, hits: np.ndarray, n: int, least: int) -> IntervalEstimate:
    """P(Binomial(n, rate) >= least), with rate = the sum of hits, float64 (chains,), over n steps per chain."""
    from scipy.stats import binom

    return clusters.statistic(lambda weights: binom.sf(least - 1, n, weights @ hits / (n * weights.sum(axis=1))))


def early_rejection(every: Sequence[Cell]) -> list[dict]:
    """Cost of cells with early rejection relative to the same cells without it. Empty if no such pair exists.

    The chains of a pair use the same uniforms. With exact early rejection they make the same decisions, and the difference in
    cost is the saving. `same` is the share of chains for which all steps agree.
    """
    plain = {(cell.alpha, cell.temperature): cell for cell in every if cell.early_reject == "off"}
    rows = []
    for cell in every:
        other = plain.get((cell.alpha, cell.temperature))
        if cell.early_reject == "off" or other is None:
            continue
        partner = {(chain.problem, chain.number): chain for chain in other.chains}
        pairs = [(chain, partner[key]) for chain in cell.chains if (key := (chain.problem, chain.number)) in partner]
        clusters = Clusters([chain.problem for chain, _ in pairs])

        shares: dict[str, float | None] = {}
        for name in ("tokens_drawn", "token_forwards", "target_forwards"):
            shares.update(clusters.ratio(*([pair[side].cost[name] for pair in pairs] for side in (0, 1))).columns(name))
        rows.append({**cell.setting, **shares, **clusters.mean([_alike(*pair) for pair in pairs]).columns("same"),
                     "chains": clusters.size})
    return rows


def _alike(chain: StepChain, other: StepChain) -> bool:
    return np.array_equal(chain.accepted, other.accepted) and np.array_equal(chain.moved, other.moved)
