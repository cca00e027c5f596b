"""Why a sequence ended: the values of `finish_reason`, and their counts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dflash_mcmc.grading.verdicts import NOT_DRAWN, TOO_LONG
from dflash_mcmc.types import Trajectory

STOP_ID, STOP_STRING, LENGTH = "stop_id", "stop_string", "length"
REASONS = (STOP_ID, STOP_STRING, LENGTH, TOO_LONG, NOT_DRAWN)
"""A stop id of the model; a string of `dataset.stop`; `dataset.max_new_tokens`; and two reasons why there is no answer."""


def of_trajectory(drawn: Trajectory, stop_ids: Collection[int]) -> str:
    """Why a drawn sequence ended. A stop id that completes a stop string counts as a stop id."""
    if not drawn.ended:
        return LENGTH
    return STOP_ID if int(drawn.tokens[-1]) in stop_ids else STOP_STRING


def counts(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The number of records with each reason: `finish_reason/stop_id`, ..."""
    reasons = [record["finish_reason"] for record in records]
    return {f"finish_reason/{reason}": reasons.count(reason) for reason in REASONS}


def remark(summary: Mapping[str, Any], max_new_tokens: int | None) -> str:
    """How many answers of a run were cut off or ended at a stop string, in words; empty if none did.

    Args:
        summary: has the keys of `counts`, if the run has samples.
    """
    cut, stopped = (summary.get(f"finish_reason/{reason}", 0) for reason in (LENGTH, STOP_STRING))
    drawn = cut + stopped + summary.get(f"finish_reason/{STOP_ID}", 0)
    cut_off = [f"{cut} of {drawn} answers were cut off at dataset.max_new_tokens={max_new_tokens}"] if cut else []
    return "; ".join([*cut_off, *([f"{stopped} of {drawn} ended with a string of dataset.stop"] if stopped else [])])
