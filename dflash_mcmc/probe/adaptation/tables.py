"""The tables of the probe: each setting against the frozen draft, and tau by position in the answer.

tau is the mean number of tokens for each forward of the target: tokens divided by blocks. Intervals are clustered by problem.
Changes are paired: a resample has the same problems for both drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_mcmc.draft.adaptation import AdaptSettings
from dflash_mcmc.probe.adaptation.walks import FROZEN, name_of
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate


def settings(records: list[dict], listed: Sequence[AdaptSettings]) -> list[dict]:
    """A row for the frozen draft and for each setting.

    `tau_change` and `log_q_change` are differences from the frozen draft, and `tau_ratio` is the ratio. `beats_target` is the
    share of tokens to which the draft gives a higher probability than the target. `seconds` are those of the steps, for each
    problem.
    """
    of = {FROZEN: None, **{name_of(each): each for each in listed}}
    return [{"setting": name, "mode": each.mode if each else None, "modules": each.modules if each else None,
             "rank": each.rank if each else None, "rate": each.rate if each else None,
             "pace": (each.steps if each.mode == "context" else each.every_blocks) if each else None,
             **_row(records, name)} for name, each in of.items()]


def positions(records: list[dict], edges: Sequence[int]) -> list[dict]:
    """A row for each draft and range of positions in the answer that has blocks. A block counts where it begins."""
    problems, rows = Clusters(range(len(records))), []
    for first, below in zip((0, *edges), (*edges, None), strict=True):
        counts = {}
        for name in records[0]["settings"]:
            gained = [[n for offset, n in record["settings"][name]["blocks"] if first <= offset < (below or np.inf)]
                      for record in records]
            counts[name] = [sum(each) for each in gained], [len(each) for each in gained]
        for name, (tokens, blocks) in counts.items():
            if sum(blocks) and sum(counts[FROZEN][1]):
                rows.append({"from": first, "to_below": below, "setting": name,
                             **problems.ratio(tokens, blocks).columns("tau"),
                             **change(problems, (tokens, blocks), counts[FROZEN]).columns("tau_change"),
                             "blocks": sum(blocks)})
    return rows


def change(problems: Clusters, ours: tuple[Sequence[float], Sequence[float]],
           theirs: tuple[Sequence[float], Sequence[float]], relative: bool = False) -> IntervalEstimate:
    """The difference, or with `relative` the quotient, of two ratios of sums over problems, each (above, below)."""
    (a, b), (c, d) = (tuple(np.array(part, np.float64) for part in pair) for pair in (ours, theirs))

    def statistic(weights: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            first, second = (weights @ a) / (weights @ b), (weights @ c) / (weights @ d)
            found = first / second if relative else first - second
        return np.where(np.isfinite(found), found, np.nan)

    return problems.statistic(statistic)


def _row(records: list[dict], name: str) -> dict:
    problems = Clusters(range(len(records)))
    tokens = [record["num_tokens"] for record in records]
    blocks, frozen = ([len(record["settings"][each]["blocks"]) for record in records] for each in (name, FROZEN))
    log_q, before, log_p = ([np.array(values) for values in found] for found in (
        [record["settings"][name]["log_q"] for record in records], [record["settings"][FROZEN]["log_q"] for record in records],
        [record["log_p"] for record in records]))
    drafted = [len(values) for values in log_q]

    def mean(values: list[np.ndarray]) -> IntervalEstimate:
        return problems.ratio([each.sum() for each in values], drafted)

    beats = mean([q > p for q, p in zip(log_q, log_p, strict=True)])
    changes = mean([q - b for q, b in zip(log_q, before, strict=True)])
    ones = [1] * len(records)
    return {**problems.ratio(tokens, blocks).columns("tau"),
            **change(problems, (tokens, blocks), (tokens, frozen)).columns("tau_change"),
            **change(problems, (tokens, blocks), (tokens, frozen), relative=True).columns("tau_ratio"),
            **mean(log_q).columns("mean_log_q"), **changes.columns("log_q_change"), **mean(log_p).columns("mean_log_p"),
            **beats.columns("beats_target"), "drafted": sum(drafted), "blocks": sum(blocks),
            **{f"{count}": sum(record["settings"][name][count] for record in records) for count in ("steps", "dropped")},
            "seconds": problems.ratio([record["seconds"][name] for record in records], ones).value}
