"""Numbers of a run from its records alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.grading.verdicts import CORRECT, NOT_DRAWN, VERDICTS
from dflash_mcmc.statistics.chains import aggregated
from dflash_mcmc.statistics.intervals import Clusters
from dflash_mcmc.statistics.outcomes import score
from dflash_mcmc.statistics.shares import accuracy

if TYPE_CHECKING:
    from dflash_mcmc.store.records import Record

NAMES = {"majority": "majority", "log_p": "best by log p"}
"""Of what several chains of a problem come to."""


def summarise(condition: str, records: list[Record]) -> dict[str, object]:
    """The summary of a run.

    `correct` is a whole number but where votes of several chains are tied, `same_string` the number of samples that the string
    rule takes for correct, null where it was not asked. Accuracy counts every sample; means are over the samples that could be
    drawn, null where there are none; acceptance, moved_rate and abandoned_rate are over proposals, null without any.
    """
    if not records:
        return {"condition": condition, "num_problems": 0, "num_samples": 0}
    verdicts = [record["verdict"] for record in records]
    drawn = [record for record in records if record["verdict"] != NOT_DRAWN]
    share, proposals = accuracy(records), _total(records, "proposals")
    correct = sum(map(score, records), 0.0)

    def mean(name: str) -> float | None:
        values = [record[name] for record in drawn if record[name] is not None]  # a vote of several chains has no log p
        return sum(values) / len(values) if values else None

    def rate(name: str) -> float | None:
        return _total(records, name) / proposals if proposals else None

    return {
        "condition": condition,
        "num_problems": len({record["problem"] for record in records}),
        "num_samples": len(records),
        "correct": int(correct) if correct.is_integer() else correct,
        **{verdict: verdicts.count(verdict) for verdict in VERDICTS if verdict != CORRECT},
        "same_string": _same_string(records),
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
        "mean_token_forwards": _total(records, "token_forwards") / len(records),
        "target_forwards": _total(records, "target_forwards"),
        "blocks_drafted": _total(records, "blocks_drafted"),
        "accepted_length": _accepted_length(records),
    }


def aggregate(condition: str, records: list[Record], by: str, num_chains: int) -> dict[str, object]:
    """The summary of one answer a problem, of so many chains of it: `majority/accuracy`, ...

    Problems with fewer chains are left out; of more the mean over all ways to take so many counts.
    """
    found = aggregated(records, by, chains=num_chains)
    return {f"{by}/{name}": value for name, value in summarise(f"{condition}, {NAMES[by]} of {num_chains}", found).items()}


def aggregate_of(summary: dict) -> dict[str, object] | None:
    """The summary that `aggregate` has put into a run's; None where there is none."""
    by = next((by for by in NAMES if f"{by}/num_samples" in summary), None)
    return by and {name.removeprefix(f"{by}/"): value for name, value in summary.items() if name.startswith(f"{by}/")}


def rates(records: list[Record]) -> dict[str, float | None]:
    """Ends of the 95 % intervals of rates and costs, bootstrapped over problems: `acceptance_low`, `acceptance_high`, ..."""
    of = Clusters([record["problem"] for record in records])
    proposals, ones = ([record["proposals"] for record in records], [1] * len(records))
    found = {name: of.ratio([record[field] for record in records], below) for name, field, below in (
        ("acceptance", "accepted", proposals), ("moved_rate", "moved", proposals), ("abandoned_rate", "abandoned", proposals),
        ("mean_token_forwards", "token_forwards", ones))}
    return {f"{name}_{end}": getattr(estimate, end) for name, estimate in found.items() for end in ("low", "high")}


def _same_string(records: list[Record]) -> int | None:
    said = [record["same_string"] for record in records if record.get("same_string") is not None]
    return sum(said) if said else None


def _accepted_length(records: list[Record]) -> float | None:
    """Tokens that a drafted block gives on average, the one behind the kept ones included; null where nothing was drafted."""
    blocks = _total(records, "tokens_drafted") and _total(records, "blocks_drafted")
    return _total(records, "tokens_drawn") / blocks if blocks else None


def _total(records: list[Record], name: str) -> float:
    return sum(record[name] for record in records)
