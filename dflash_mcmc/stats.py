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
    """The summary of a run.

    Accuracy counts every sample; means are over the samples that could be drawn, null where there are none; acceptance,
    moved_rate and abandoned_rate are over proposals, null without any.
    """
    if not records:
        return {"condition": condition, "num_problems": 0, "num_samples": 0}
    verdicts = [record["verdict"] for record in records]
    drawn = [record for record in records if record["verdict"] != "error"]
    share, proposals = accuracy(records), _total(records, "proposals")

    def mean(name: str) -> float | None:
        return _total(drawn, name) / len(drawn) if drawn else None

    def rate(name: str) -> float | None:
        return _total(records, name) / proposals if proposals else None

    return {
        "condition": condition,
        "num_problems": len({record["problem"] for record in records}),
        "num_samples": len(records),
        **{verdict: verdicts.count(verdict) for verdict in ("correct", "wrong", "unparsed", "error")},
        "accuracy": share.value, "accuracy_low": share.low, "accuracy_high": share.high,
        "mean_tokens": mean("num_tokens"),
        "mean_log_p": mean("log_p"),
        "mean_seconds": mean("seconds"),
        "mean_share_seconds": mean("share_seconds"),
        "proposals": proposals,
        "acceptance": rate("accepted"),
        "moved_rate": rate("moved"),
        "abandoned_rate": rate("abandoned"),
        "law_error": max(record["law_error"] for record in records),
        "tokens_drawn": _total(records, "tokens_drawn"),
        "tokens_skipped": _total(records, "tokens_skipped"),
        "token_forwards": _total(records, "token_forwards"),
        "target_forwards": _total(records, "target_forwards"),
        "blocks_drafted": _total(records, "blocks_drafted"),
        "accepted_length": _accepted_length(records),
    }


def _accepted_length(records: list[dict]) -> float | None:
    """Tokens that a drafted block gives on average, the one behind the kept ones included; null where nothing was drafted."""
    blocks = _total(records, "tokens_drafted") and _total(records, "blocks_drafted")
    return _total(records, "tokens_drawn") / blocks if blocks else None


def _total(records: list[dict], name: str) -> float:
    return sum(record[name] for record in records)
