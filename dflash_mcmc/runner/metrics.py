"""The numbers of a single sample that a tracker logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.grading.verdicts import CORRECT
from dflash_mcmc.statistics.summaries import accepted_length
from dflash_mcmc.store import finishes

if TYPE_CHECKING:
    from dflash_mcmc.store.records import Record


def metrics_of(record: Record) -> dict[str, float | None]:
    """The numbers of a sample that a tracker logs."""
    metrics: dict[str, float | None] = {
        "sample/correct": float(record["verdict"] == CORRECT), "sample/num_tokens": record["num_tokens"],
        "sample/cut_off": float(finishes.of_record(record) == finishes.LENGTH),
        "sample/log_p": record["log_p"], "sample/seconds": record["seconds"],
        "sample/token_forwards": record["token_forwards"]}
    if record["proposals"]:
        metrics["sample/acceptance"] = record["accepted"] / record["proposals"]
        metrics["sample/moved_rate"] = record["moved"] / record["proposals"]
        metrics["sample/abandoned_rate"] = record["abandoned"] / record["proposals"]
    metrics |= {f"sample/{name}": value for name, value in record.get("measures", {}).items()}
    if (length := accepted_length([record])) is not None:
        metrics["sample/accepted_length"] = length
    return metrics
