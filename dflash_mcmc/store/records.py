"""The format of records, and the files that hold them. `reading.py` reads the files.

A record is one line of JSON with a checksum (`schema.py`), and a line counts only if it ends with a line feed. A process
writes to `records.jsonl`, or to `records.1.jsonl`, ... if other processes write at the same time.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict, final

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.verdicts import NOT_DRAWN, TOO_LONG, VERDICTS
from dflash_mcmc.store.schema import Count, Finite, OneOf, Range, Schema, Whole
from dflash_mcmc.types import Trajectory

STOP_ID, STOP_STRING, LENGTH = "stop_id", "stop_string", "length"
REASONS = (STOP_ID, STOP_STRING, LENGTH, TOO_LONG, NOT_DRAWN)
"""A stop id of the model; a string of `dataset.stop`; `dataset.max_new_tokens`; and two reasons why there is no answer."""


def finish_of(drawn: Trajectory, stop_ids: Collection[int]) -> str:
    """Why a drawn sequence ended. A stop id that completes a stop string counts as a stop id."""
    if not drawn.ended:
        return LENGTH
    return STOP_ID if int(drawn.tokens[-1]) in stop_ids else STOP_STRING


def finish_counts(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The number of records with each reason: `finish_reason/stop_id`, ..."""
    reasons = [record["finish_reason"] for record in records]
    return {f"finish_reason/{reason}": reasons.count(reason) for reason in REASONS}


def finish_remark(summary: Mapping[str, Any], max_new_tokens: int | None) -> str:
    """How many answers of a run were cut off or ended at a stop string, in words; empty if none did.

    Args:
        summary: has the keys of `finish_counts`, if the run has samples.
    """
    cut, stopped = (summary.get(f"finish_reason/{reason}", 0) for reason in (LENGTH, STOP_STRING))
    drawn = cut + stopped + summary.get(f"finish_reason/{STOP_ID}", 0)
    cut_off = [f"{cut} of {drawn} answers were cut off at dataset.max_new_tokens={max_new_tokens}"] if cut else []
    return "; ".join([*cut_off, *([f"{stopped} of {drawn} ended with a string of dataset.stop"] if stopped else [])])


SampleKey = tuple[str, int]
"""The key of a sample: problem id and number of the chain. A unit of a probe has a key of the same form."""
RECORDS = "records.jsonl"
DAMAGED = "records.damaged.jsonl"
"""The file to which `repair=true` moves damaged lines."""
NUM_FILES = 4093
"""Largest number of files of records, and of processes that draw a run at a time."""
FAILURE = "failure"
"""The field of a probe's record that says why the unit was never measured. Such a record has no other field but its key."""


@final
class Record(TypedDict):
    """The record of a sample. The records of a probe have `problem`, `chain`, and fields of the probe's own."""

    problem: str
    """Id of the problem."""
    chain: Count
    """Number of the chain among those of the problem."""
    level: Whole | str | None
    """Level of difficulty, if the dataset has one. Datasets of this package have numbers."""
    subject: str | None
    """Subject of the problem, if the dataset has one."""
    verdict: Annotated[str, OneOf(VERDICTS)]
    """One of `grading.verdicts.VERDICTS`."""
    answer: str | None
    """The extracted final answer."""
    rule: str
    """The grading rule that decided."""
    reason: str
    """A detail that the rule does not give: an exception, a signal, or why the sample was not drawn or is too long."""
    same_string: bool | None
    """Verdict of the string rule, for comparison; None if it was not applied."""
    walls: Sequence[str]
    """The sandbox layers around a program that the grader ran."""
    gold: str
    """The correct answer as the dataset writes it."""
    text: str
    """The decoded answer, up to a stop string."""
    num_tokens: Count
    """Tokens of the answer, with all tokens of a stop string."""
    ended: bool
    """Whether the answer ends with a stop id or a stop string."""
    finish_reason: Annotated[str, OneOf(REASONS)]
    """Why the sequence ended, one of REASONS."""
    log_p: float
    """Log probability of the answer under the target at temperature 1, in nats."""
    log_q: float | None
    """Log probability of the answer under the laws that its tokens were drawn from, in nats; None for probability 0: a token
    that the draft of a mixture lacks."""
    proposals: Count
    """Metropolis-Hastings proposals."""
    accepted: Count
    """Accepted proposals."""
    moved: Count
    """Accepted proposals that differ from the state."""
    abandoned: Count
    """Proposals that early rejection has ended."""
    law_error: Annotated[float, Range(0)]
    """Bound on the total variation distance between the sample's law and the sampler's law; 0 if exact."""
    tokens_drawn: Count
    """Tokens drawn, including those of rejected proposals."""
    target_forwards: Count
    """Forward passes of the target that the chain took part in."""
    token_forwards: Count
    """Positions at which the target was evaluated."""
    tokens_skipped: Count
    """Tokens of proposals that were copied from the current sequence without evaluating the target."""
    blocks_drafted: Count
    """Blocks that a draft proposed."""
    tokens_drafted: Count
    """Tokens of these blocks."""
    tokens_kept: Count
    """Drafted tokens that were kept."""
    blocks_verified: NotRequired[Count]
    """Blocks that a decoder verified; only if a sampler drafts the others of `blocks_drafted`."""
    tokens_verified: NotRequired[Count]
    """Tokens that these blocks gave."""
    tokens_shared: NotRequired[Count]
    """Positions at which draws asked for together had the same tokens, so that the target was evaluated once; only if any."""
    prompt_forwards: NotRequired[Count]
    """The part of `token_forwards` that reads the prompt, which the engine does once for all chains of the problem; absent if
    it is 0."""
    companion_forwards: NotRequired[Count]
    """Positions at which the other model of a blend was evaluated; only if there is one."""
    seconds: Annotated[float, Range(0)]
    """Seconds from the chain's start in a slot to its end."""
    share_seconds: Annotated[float, Range(0)]
    """The chain's share of the engine's time."""
    prefill_seconds: NotRequired[Annotated[float, Range(0)]]
    """The part of `share_seconds` in which prompts and prefixes were read; only of engines that measure it."""
    grade_seconds: NotRequired[Annotated[float, Range(0)]]
    """Seconds of the grader's work on this answer. It runs beside the engine."""
    passed: NotRequired[Annotated[float, Range(0)]]
    """The share of its question's examples that a program passes; only with `grader.examples`."""
    behaviour: NotRequired[str]
    """A hash of what the program returns on their calls and on changed ones, if it returns anything."""
    tokens: NotRequired[list[Count]]
    """Token ids of the answer. This field and the next four are in the files only; a run does not keep them in memory."""
    sampling_mask: NotRequired[list[list[Count]]]
    """For each token of the answer, the ids that the law of the draw kept; only with `sampler.sampling_mask`."""
    sampling_mask_logprobs: NotRequired[list[list[float]]]
    """Their log probabilities under that law, in nats; those of a token sum to 1."""
    trace: NotRequired[list[dict[str, float | str | bool]]]
    """One entry per proposal, or per candidate."""
    walk: NotRequired[Annotated[list[dict[str, object]], Finite()]]
    """One entry per drafted block, if the decoder keeps a trace."""
    measures: NotRequired[dict[str, float]]
    """Diagnostics of the whole chain, by name; only of samplers that have some."""
    bits: NotRequired[Annotated[str, OneOf(("server",))]]
    """Whose the last bits are, and so the tokens of a seed: `server` with engine=api; absent where they are the engine's."""
    prompt_tokens: NotRequired[Count]
    """Tokens of a prompt that is too long; only with this verdict."""
    grader: str
    """The grader and its version."""
    before: NotRequired[Annotated[dict[str, Any], Finite()]]
    """The grade before the run was graded again: the fields of `Grade`, and `grader`. Only records graded again have it."""


def key_of(record: Mapping[str, Any]) -> SampleKey:
    """The key of a sample's or a unit's record."""
    return record["problem"], record["chain"]


@final
class UnitRecord(TypedDict):
    """The keys of every probe's record."""

    problem: str
    chain: Count
    failure: NotRequired[str]
    """Why the unit was never measured; see `FAILURE`."""
    skipped: NotRequired[str]
    """Why the unit has nothing to measure."""


@cache
def sample_schema() -> Schema:
    """The schema of a sample's record."""
    return Schema(Record)


@cache
def unit_schema() -> Schema:
    """The schema of a probe's record. What the probe measures has finite numbers."""
    return Schema(UnitRecord)


def records_file(number: int, stem: str = "records") -> str:
    """The name of a process's file of records, by its number."""
    return f"{stem}.{number}.jsonl" if number else f"{stem}.jsonl"


def record_files(folder: Path, others: bool = False) -> dict[int, Path]:
    """The files of records by their numbers, in order. Raises UserError for a name that no run gives to a file of records.

    Args:
        others: whether to ignore files with such names.
    """
    files: dict[int, Path] = {}
    for path in folder.glob("records*.jsonl"):
        match = re.fullmatch(r"records(?:\.(\d+))?\.jsonl", path.name)
        if match is None:
            continue
        number = int(match[1]) if match[1] and len(match[1]) < 10 else NUM_FILES if match[1] else 0
        if number >= NUM_FILES or path.name != records_file(number):
            if others:
                continue
            raise UserError(f"{path.parent}: given a file {path.name[:60]}; allowed: {RECORDS}, and records.N.jsonl with N "
                            f"from 1 to {NUM_FILES - 1}; rename it or move it away")
        files[number] = path
    return dict(sorted(files.items()))
