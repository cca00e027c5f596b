"""Numbers of a run from its records alone."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

_CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float


def accuracy(records: list[dict]) -> Interval:
    """Share of correct samples. Wilson interval (Wilson 1927); with several chains a problem, a bootstrap over problems.

    Samples of one problem are not independent, so problems are what is drawn anew (Miller 2024, arXiv 2411.00640).
    """
    from scipy import stats

    by_problem = defaultdict(list)
    for record in records:
        by_problem[record["problem"]].append(record["verdict"] == "correct")
    correct = sum(map(sum, by_problem.values()))
    value = correct / len(records)
    if len(by_problem) == len(records):
        interval = stats.binomtest(correct, len(records)).proportion_ci(_CONFIDENCE, method="wilson")
        return Interval(value, float(interval.low), float(interval.high))
    if len(by_problem) == 1:
        return Interval(value, 0.0, 1.0)
    shares = {sum(v) / len(v) for v in by_problem.values()}
    if len(shares) == 1 and shares <= {0.0, 1.0}:  # nothing varies that could be drawn anew: problems are what counts
        interval = stats.binomtest(round(value * len(by_problem)), len(by_problem)).proportion_ci(_CONFIDENCE, method="wilson")
        return Interval(value, float(interval.low), float(interval.high))
    hits = np.array([sum(v) for v in by_problem.values()])
    sizes = np.array([len(v) for v in by_problem.values()])
    found = stats.bootstrap((hits, sizes), lambda h, n, axis: h.sum(axis) / n.sum(axis), paired=True, vectorized=True,
                            confidence_level=_CONFIDENCE, method="percentile", rng=np.random.default_rng(0))
    return Interval(value, float(found.confidence_interval.low), float(found.confidence_interval.high))


def summarise(condition: str, records: list[dict]) -> dict[str, object]:
    """The summary of a run. Means are over samples; acceptance and moved_rate are over proposals, null without any."""
    if not records:
        return {"condition": condition, "num_problems": 0, "num_samples": 0}
    verdicts = [record["verdict"] for record in records]
    share, proposals = accuracy(records), _total(records, "proposals")
    return {
        "condition": condition,
        "num_problems": len({record["problem"] for record in records}),
        "num_samples": len(records),
        "correct": verdicts.count("correct"),
        "wrong": verdicts.count("wrong"),
        "unparsed": verdicts.count("unparsed"),
        "accuracy": share.value, "accuracy_low": share.low, "accuracy_high": share.high,
        "mean_tokens": _total(records, "num_tokens") / len(records),
        "mean_log_p": _total(records, "log_p") / len(records),
        "mean_seconds": _total(records, "seconds") / len(records),
        "mean_share_seconds": _total(records, "share_seconds") / len(records),
        "proposals": proposals,
        "acceptance": _total(records, "accepted") / proposals if proposals else None,
        "moved_rate": _total(records, "moved") / proposals if proposals else None,
        "tokens_drawn": _total(records, "tokens_drawn"),
        "token_forwards": _total(records, "token_forwards"),
        "target_forwards": _total(records, "target_forwards"),
    }


def _total(records: list[dict], name: str) -> float:
    return sum(record[name] for record in records)
