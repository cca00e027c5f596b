"""The format of records, and the files that hold them.

A record is one line of JSON, and a line counts only if it ends with a line feed. A process writes to `records.jsonl`, or to
`records.1.jsonl`, ... if other processes write at the same time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast, final

from dflash_mcmc.errors import UserError, note
from dflash_mcmc.grading.verdicts import NOT_DRAWN
from dflash_mcmc.store import finishes
from dflash_mcmc.types import ChainResult, Trajectory

if TYPE_CHECKING:
    import numpy as np

    from dflash_mcmc.inference.interface import ChainTarget, Finished
    from dflash_mcmc.types import Grade, Problem

SampleKey = tuple[str, int]
"""The key of a sample: problem id and number of the chain. A unit of a probe has a key of the same form."""
RECORDS = "records.jsonl"
FAILURE = "failure"
"""The field of a probe's record that says why the unit was never measured. Such a record has no other field but its key."""


@final
class Record(TypedDict):
    """The record of a sample. The records of a probe have `problem`, `chain`, and fields of the probe's own."""

    problem: str
    """Id of the problem."""
    chain: int
    """Number of the chain among those of the problem."""
    level: int | None
    """Level of difficulty, if the dataset has one."""
    subject: str | None
    """Subject of the problem, if the dataset has one."""
    verdict: str
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
    num_tokens: int
    """Tokens of the answer, with all tokens of a stop string."""
    ended: bool
    """Whether the answer ends with a stop id or a stop string."""
    finish_reason: NotRequired[str]
    """Why the sequence ended, one of `finishes.REASONS`. Older records lack it; `finishes.of_record` derives it."""
    log_p: float
    """Log probability of the answer under the target at temperature 1, in nats."""
    log_q: float
    """Log probability of the answer under the laws that its tokens were drawn from, in nats."""
    proposals: int
    """Metropolis-Hastings proposals."""
    accepted: int
    """Accepted proposals."""
    moved: int
    """Accepted proposals that differ from the state."""
    abandoned: int
    """Proposals that early rejection has ended."""
    law_error: float
    """Bound on the total variation distance between the sample's law and the sampler's law; 0 if exact."""
    tokens_drawn: int
    """Tokens drawn, including those of rejected proposals."""
    target_forwards: int
    """Forward passes of the target that the chain took part in."""
    token_forwards: int
    """Positions at which the target was evaluated."""
    tokens_skipped: int
    """Tokens of proposals that were copied from the current sequence without evaluating the target."""
    blocks_drafted: int
    """Blocks that a draft proposed."""
    tokens_drafted: int
    """Tokens of these blocks."""
    tokens_kept: int
    """Drafted tokens that were kept."""
    tokens_shared: NotRequired[int]
    """Positions at which draws asked for together had the same tokens, so that the target was evaluated once; only if any."""
    seconds: float
    """Seconds from the chain's start in a slot to its end."""
    share_seconds: float
    """The chain's share of the engine's time."""
    tokens: NotRequired[list[int]]
    """Token ids of the answer. This field, `trace` and `walk` are in the files only; a run does not keep them in memory."""
    trace: NotRequired[list[dict[str, float | int | str]]]
    """One entry per proposal, or per candidate."""
    measures: NotRequired[dict[str, float]]
    """Diagnostics of the whole chain, by name; only of samplers that have some."""
    walk: NotRequired[list[dict[str, object]]]
    """One entry per drafted block, if the decoder keeps a trace."""
    prompt_tokens: NotRequired[int]
    """Tokens of a prompt that is too long; only with this verdict."""
    grader: NotRequired[str]
    """The grader and its version. Older records lack it."""
    before: NotRequired[dict[str, Any]]
    """The grade before the run was graded again: the fields of `Grade`, and `grader`. Only records graded again have it."""


def record_of(problem: Problem, chain: int, prompt: np.ndarray, grade: Grade, done: Finished,
              target: ChainTarget, grader: str) -> Record:
    """The record of a sample. `done.result` is None for a sample that could not be drawn."""
    result = done.result or ChainResult(Trajectory.start(prompt))
    path, cost = result.trajectory, done.cost
    record: Record = {
        "problem": problem.id, "chain": chain, "level": problem.level, "subject": problem.subject,
        "verdict": grade.verdict, "answer": grade.answer, "rule": grade.rule, "reason": grade.reason,
        "same_string": grade.same_string, "walls": grade.walls, "gold": problem.answer,
        "text": target.decode(path.tokens), "num_tokens": path.length, "ended": path.ended,
        "finish_reason": finishes.of_trajectory(path, target.stop_ids) if done.result else NOT_DRAWN,
        "log_p": float(path.log_p.sum()), "log_q": float(path.log_q.sum()),
        "proposals": result.proposals, "accepted": result.accepted,
        "moved": result.moved, "abandoned": result.abandoned, "law_error": result.law_error,
        "tokens_drawn": cost.tokens_drawn, "target_forwards": cost.target_forwards, "token_forwards": cost.token_forwards,
        "tokens_skipped": cost.tokens_skipped, "blocks_drafted": cost.blocks_drafted,
        "tokens_drafted": cost.tokens_drafted, "tokens_kept": cost.tokens_kept,
        "seconds": round(done.seconds, 6), "share_seconds": round(done.share_seconds, 6), "tokens": path.tokens.tolist(),
        "trace": list(result.trace),
    }
    if result.measures:
        record["measures"] = dict(result.measures)
    if cost.tokens_shared:
        record["tokens_shared"] = cost.tokens_shared
    if done.walk:
        record["walk"] = list(done.walk)
    record["grader"] = grader
    return record


def key_of(record: Mapping[str, Any]) -> SampleKey:
    """The key of a sample's or a unit's record."""
    return record["problem"], record["chain"]


def records_file(number: int, stem: str = "records") -> str:
    """The name of a process's file of records, by its number."""
    return f"{stem}.{number}.jsonl" if number else f"{stem}.jsonl"


def record_files(folder: Path) -> dict[int, Path]:
    """The files of records by their numbers, in order."""
    named = [(re.fullmatch(r"records(?:\.(\d+))?\.jsonl", path.name), path) for path in folder.glob("records*.jsonl")]
    return dict(sorted((int(match[1] or 0), path) for match, path in named if match))


def read_records(folder: Path) -> list[Record]:
    """The records of a run, which may be in progress. Raises UserError for a corrupt file."""
    records: list[Record] = []
    places: dict[SampleKey, str] = {}
    for path in record_files(folder).values():
        for number, record in enumerate(parse(path, path.read_bytes())[0], start=1):
            place, key = f"{path}: line {number}", key_of(record)
            if key in places:
                note_repeated(key, place, places[key])
                continue
            places[key] = place
            records.append(cast(Record, record))
    return records


def recorded_keys(folder: Path) -> set[SampleKey]:
    """The keys of a run's records, without its locks. Raises UserError for a corrupt file."""
    return {key_of(record) for path in record_files(folder).values() for record in parse(path, path.read_bytes())[0]}


def parse(path: Path, content: bytes, before: int = 0) -> tuple[list[dict], int]:
    """(records, number of bytes up to the last line feed) of a part of a file. Raises UserError for a corrupt line.

    Args:
        before: number of lines of the file before this part.
    """
    good, records = content.rfind(b"\n") + 1, []
    for number, line in enumerate(content[:good].splitlines(), start=before + 1):
        try:
            record = json.loads(line)
            key_of(record)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: line {number} is no record ({type(error).__name__}); move the file away to start again, "
                            "or delete that line to have its sample drawn again") from error
        records.append(record)
    return records, good


def note_repeated(key: SampleKey, place: str, first: str) -> None:
    """Prints that a second record of a sample is ignored.

    If a file server takes a live process for dead, another process can draw the same sample, with the same randomness.
    """
    note(f"{place} repeats problem {key[0]}, chain {key[1]}; the record in {first} is used")
