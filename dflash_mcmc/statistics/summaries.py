"""The summary of a run, computed only from its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from dflash_mcmc.grading.verdicts import CORRECT, NOT_DRAWN, VERDICTS
from dflash_mcmc.statistics.chains import aggregated
from dflash_mcmc.statistics.intervals import Clusters
from dflash_mcmc.statistics.outcomes import score
from dflash_mcmc.statistics.shares import accuracy

if TYPE_CHECKING:
    from dflash_mcmc.statistics.outcomes import Outcome, Summed
    from dflash_mcmc.store.records import Record

NAMES = {"majority": "majority", "log_p": "best by log p"}
"""How several chains of a problem are combined, in words."""


def summarise(condition: str, records: Sequence[Outcome]) -> dict[str, object]:
    """The summary of a run.

    `correct` is a whole number unless votes of several chains are tied. `same_string` is the number of samples that the string
    rule counts as correct; it is null if the rule was not applied. Accuracy counts every sample. Means are over the samples
    that could be drawn; they are null if no sample could be drawn. `acceptance`, `moved_rate` and `abandoned_rate` are shares
    of the proposals; they are null without proposals.
    """
    if not records:
        return {"condition": condition, "num_problems": 0, "num_samples": 0}
    verdicts = [record["verdict"] for record in records]
    drawn = [record for record in records if record["verdict"] != NOT_DRAWN]
    share, proposals = accuracy(records), _total(records, "proposals")
    correct = sum(map(score, records), 0.0)

    def mean(name: Literal["num_tokens", "log_p", "seconds", "share_seconds"]) -> float | None:
        values = [value for record in drawn if (value := record[name]) is not None]  # a vote has no log p
        return sum(values) / len(values) if values else None

    def rate(name: Summed) -> float | None:
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


def aggregate(condition: str, records: Sequence[Record], by: str, num_chains: int) -> dict[str, object]:
    """The summary of combined answers, one per problem, each from `num_chains` chains. Its keys are `majority/accuracy`, ...

    Problems with fewer chains are left out. If a problem has more chains, its values are means over all ways to choose the
    chains.
    """
    found = aggregated(records, by, chains=num_chains)
    return {f"{by}/{name}": value for name, value in summarise(f"{condition}, {NAMES[by]} of {num_chains}", found).items()}


def aggregate_of(summary: dict) -> dict[str, object] | None:
    """The part that `aggregate` added to a run's summary; None if it has none."""
    by = next((by for by in NAMES if f"{by}/num_samples" in summary), None)
    if by is None:
        return None
    return {name.removeprefix(f"{by}/"): value for name, value in summary.items() if name.startswith(f"{by}/")}


def rates(records: Sequence[Record]) -> dict[str, float | None]:
    """Ends of the 95 % bootstrap intervals over problems for rates and costs: `acceptance_low`, `acceptance_high`, ..."""
    of = Clusters([record["problem"] for record in records])
    proposals, ones = ([record["proposals"] for record in records], [1] * len(records))
    shares: dict[str, tuple[Summed, list[int]]] = {
        "acceptance": ("accepted", proposals), "moved_rate": ("moved", proposals), "abandoned_rate": ("abandoned", proposals),
        "mean_token_forwards": ("token_forwards", ones)}
    found = {name: of.ratio([record[field] for record in records], below) for name, (field, below) in shares.items()}
    return {f"{name}_{end}": getattr(estimate, end) for name, estimate in found.items() for end in ("low", "high")}


def _same_string(records: Sequence[Outcome]) -> int | None:
    known = [same for record in records if "same_string" in record and (same := record["same_string"]) is not None]
    return sum(known) if known else None


def _accepted_length(records: Sequence[Outcome]) -> float | None:
    """Mean tokens per drafted block, including the token after the accepted ones; null if no block was drafted."""
    blocks = _total(records, "tokens_drafted") and _total(records, "blocks_drafted")
    return _total(records, "tokens_drawn") / blocks if blocks else None


def _total(records: Sequence[Outcome], name: Summed) -> float:
    return sum(record[name] for record in records)
