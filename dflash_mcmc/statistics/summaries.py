"""The summary of a run, computed only from its records."""

from collections.abc import Sequence
from typing import Literal

from dflash_mcmc.grading.verdicts import CORRECT, UNDRAWN, VERDICTS
from dflash_mcmc.statistics.chains import aggregated
from dflash_mcmc.statistics.estimates import Clusters, Outcome, Summed, accuracy, forwards_together, score
from dflash_mcmc.statistics.votes import IN_WORDS, PROGRAM_RULES, WEIGHTED, VoteRule
from dflash_mcmc.store.records import Record

NAMES = ("majority", *WEIGHTED, "log_p", *PROGRAM_RULES)
"""The ways to combine several chains of a problem."""
_IN_WORDS = {"majority": "majority", "log_p": "best by log p", **IN_WORDS}


def summarise(condition: str, records: Sequence[Outcome]) -> dict[str, object]:
    """The summary of a run.

    `correct` is a whole number unless votes of several chains are tied. `same_string` is the number of samples that the string
    rule counts as correct; it is null if the rule was not applied. Accuracy counts every sample. Means are over the samples
    that could be drawn; they are null if no sample could be drawn. `token_forwards` is what the engine evaluated, the prompt
    of a problem once for all of its chains; `mean_token_forwards` is the cost of a sample alone. `acceptance`, `moved_rate`
    and `abandoned_rate` are shares of the proposals; they are null without proposals.
    """
    if not records:
        return {"condition": condition, "num_problems": 0, "num_samples": 0}
    verdicts = [record["verdict"] for record in records]
    drawn = [record for record in records if record["verdict"] not in UNDRAWN]
    share, proposals = accuracy(records), _total(records, "proposals")
    correct = sum(map(score, records), 0.0)

    def mean(name: Literal["num_tokens", "log_p", "seconds", "share_seconds"]) -> float | None:
        values = [value for record in drawn if (value := record[name]) is not None]  # a vote has no log p
        return sum(values) / len(values) if values else None

    def rate(name: Summed) -> float | None:
        return _total(records, name) / proposals if proposals else None

    judged = [same for record in records if "same_string" in record and (same := record["same_string"]) is not None]
    return {
        "condition": condition,
        "num_problems": len({record["problem"] for record in records}),
        "num_samples": len(records),
        "correct": int(correct) if correct.is_integer() else correct,
        **{verdict: verdicts.count(verdict) for verdict in VERDICTS if verdict != CORRECT},
        "same_string": sum(judged) if judged else None,
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
        "token_forwards": forwards_together(records),
        "mean_token_forwards": _total(records, "token_forwards") / len(records),
        "target_forwards": _total(records, "target_forwards"),
        "blocks_drafted": _total(records, "blocks_drafted"),
        "accepted_length": accepted_length(records),
    }


def aggregate(condition: str, records: Sequence[Record], by: str | VoteRule, num_chains: int) -> dict[str, object]:
    """The summary of combined answers, one per problem, each from `num_chains` chains. Its keys are `majority/accuracy`, ...

    A weighted vote also has `effective_chains`, the mean effective number of chains, and `dominated`, the share of problems
    on which one chain has more than half of the weight. Problems with fewer chains are left out. If a problem has more chains,
    its values are means over the ways to choose the chains.

    Args:
        by: `majority`, `log_p`, or the rule of a weighted vote.
    """
    name, words = (by, _IN_WORDS[by]) if isinstance(by, str) else (by.name, by.shown)
    combined = aggregated(records, by, chains=num_chains)
    summary = summarise(f"{condition}, {words} of {num_chains}", combined)
    if combined and not isinstance(by, str):
        summary |= {"effective_chains": sum(row["effective"] for row in combined) / len(combined),
                    "dominated": sum(row["dominated"] for row in combined) / len(combined)}
    return {f"{name}/{key}": value for key, value in summary.items()}


def aggregates_of(summary: dict) -> list[dict[str, object]]:
    """The parts that `aggregate` added to a run's summary, in their order."""
    names = [key.partition("/")[0] for key in summary if key.endswith("/num_samples")]
    return [{key.removeprefix(f"{by}/"): value for key, value in summary.items() if key.startswith(f"{by}/")} for by in names]


def measures(records: Sequence[Record]) -> dict[str, float]:
    """The means of the numbers that samplers add to their records: `measures/log_z`, ... Empty for most samplers.

    A mean is over the records that have the number.
    """
    names = dict.fromkeys(name for record in records for name in record.get("measures", {}))
    values = {name: [record["measures"][name] for record in records if name in record.get("measures", {})] for name in names}
    return {f"measures/{name}": sum(column) / len(column) for name, column in values.items()}


TIMES = ("prefill", "draw", "grade")
"""The parts of a sample's time in `times`."""


def times(records: Sequence[Record]) -> dict[str, float]:
    """Where the seconds of a sample go, in means over the samples that were measured: `mean_prefill_seconds`,
    `mean_draw_seconds` and `mean_grade_seconds`.

    Prefill and draw are parts of the device seconds (`share_seconds`): prompts and prefixes that were read, and the rest. The
    grader works beside the engine. A part that no record has is left out.
    """
    read = [(record["prefill_seconds"], record["share_seconds"]) for record in records if "prefill_seconds" in record]
    graded = [record["grade_seconds"] for record in records if "grade_seconds" in record]
    means = {}
    if read:
        prefill, device = (sum(column) / len(read) for column in zip(*read, strict=True))
        means = {"mean_prefill_seconds": prefill, "mean_draw_seconds": max(0.0, device - prefill)}
    return means | ({"mean_grade_seconds": sum(graded) / len(graded)} if graded else {})


def beside(records: Sequence[Record]) -> dict[str, int]:
    """`companion_forwards`: positions at which the other model of a blend was evaluated. Empty without one."""
    forwards = [record["companion_forwards"] for record in records if "companion_forwards" in record]
    return {"companion_forwards": sum(forwards)} if forwards else {}


def rates(records: Sequence[Record]) -> dict[str, float | None]:
    """Ends of the 95 % bootstrap intervals over problems for rates and costs: `acceptance_low`, `acceptance_high`, ..."""
    of = Clusters([record["problem"] for record in records])
    proposals, ones = ([record["proposals"] for record in records], [1] * len(records))
    shares: dict[str, tuple[Summed, list[int]]] = {
        "acceptance": ("accepted", proposals), "moved_rate": ("moved", proposals), "abandoned_rate": ("abandoned", proposals),
        "mean_token_forwards": ("token_forwards", ones)}
    estimates = {name: of.ratio([record[field] for record in records], below) for name, (field, below) in shares.items()}
    return {f"{name}_{end}": getattr(estimate, end) for name, estimate in estimates.items() for end in ("low", "high")}


def accepted_length(records: Sequence[Outcome]) -> float | None:
    """Mean tokens per drafted block, including the token after the accepted ones; null if no block was drafted.

    It is null too for records that count the blocks of a decoder apart without their tokens, as older ones do.
    """
    if any("blocks_verified" in record for record in records):  # the other blocks are a sampler's
        known = [record for record in records if "tokens_verified" in record]
        return _total(known, "tokens_verified") / _total(known, "blocks_verified") if known else None
    blocks = _total(records, "tokens_drafted") and _total(records, "blocks_drafted")
    return _total(records, "tokens_drawn") / blocks if blocks else None


def _total(records: Sequence[Outcome], name: Summed) -> float:
    return sum(record[name] for record in records)
