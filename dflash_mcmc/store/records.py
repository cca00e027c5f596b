"""What a run writes, and its readers: `run.json`, `problems.jsonl`, `attempts.jsonl`, and the files of records.

A record is one line of JSON with a checksum (`files.py`), and a line counts only if it ends with a line feed. A process
writes to `records.jsonl`, or to `records.1.jsonl`, ... if other processes write at the same time. Each line is checked against
its checksum and the schema of its record, whoever reads it. `move_damaged` moves damaged lines to `records.damaged.jsonl` on
request, so that their tasks are done again.

The file of problems has question and prompt of each. It is replaced as a whole and under the lock of the folder. So it is
never partial, and processes that share a run write each problem once. A process writes it before its first record, so that
every record's problem is in it.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, cast, final

from typing_extensions import TypedDict

from dflash_mcmc.errors import UserError, note, reason_of, writing
from dflash_mcmc.grading.verdicts import NOT_DRAWN, TOO_LONG, VERDICTS
from dflash_mcmc.store import files
from dflash_mcmc.store.files import Count, Damaged, Schema, Whole, each_line, is_there, objects_of, read_regular, to_line
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
    verdict: Annotated[str, files.OneOf(VERDICTS)]
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
    finish_reason: Annotated[str, files.OneOf(REASONS)]
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
    law_error: Annotated[float, files.Range(0)]
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
    seconds: Annotated[float, files.Range(0)]
    """Seconds from the chain's start in a slot to its end."""
    share_seconds: Annotated[float, files.Range(0)]
    """The chain's share of the engine's time."""
    prefill_seconds: NotRequired[Annotated[float, files.Range(0)]]
    """The part of `share_seconds` in which prompts and prefixes were read; only of engines that measure it."""
    grade_seconds: NotRequired[Annotated[float, files.Range(0)]]
    """Seconds of the grader's work on this answer. It runs beside the engine."""
    passed: NotRequired[Annotated[float, files.Range(0)]]
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
    walk: NotRequired[Annotated[list[dict[str, object]], files.Finite()]]
    """One entry per drafted block, if the decoder keeps a trace."""
    measures: NotRequired[dict[str, float]]
    """Diagnostics of the whole chain, by name; only of samplers that have some."""
    bits: NotRequired[Annotated[str, files.OneOf(("server",))]]
    """Whose the last bits are, and so the tokens of a seed: `server` with engine=api; absent where they are the engine's."""
    prompt_tokens: NotRequired[Count]
    """Tokens of a prompt that is too long; only with this verdict."""
    grader: str
    """The grader and its version."""
    before: NotRequired[Annotated[dict[str, Any], files.Finite()]]
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


RUN, CONFIG = "run.json", "config.yaml"


class Described(NamedTuple):
    """The content of `run.json`."""

    identity: dict[str, Any]
    sessions: list[dict[str, Any]]
    """One entry per start of the run; at least one."""


class _StartOfRun(TypedDict, total=False):
    """The entries of a start that reports read, where they are there."""

    started: str | None
    commit: str | None
    host: str | None
    device: str | None
    python: str | None
    packages: dict[str, str | None]


class _RunFile(TypedDict):
    identity: dict[str, Any]
    sessions: list[_StartOfRun]


_RUN_FILE = Schema(_RunFile)


def hash_of(identity: dict[str, object]) -> str:
    """Twelve hexadecimal digits of an identity. Reads no dataset and no checkpoint."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def described(path: Path) -> Described:
    """The description of a run. Raises UserError for a file that a run did not write."""
    content = json_object(path)
    fault = _RUN_FILE.fault(content)
    if fault or not (content["identity"] and content["sessions"]):
        raise UserError(f"{path}: {fault or 'holds no identity or no sessions; allowed: the file as a run wrote it'}")
    identity, sessions = content["identity"], content["sessions"]
    for name, value in identity.items():
        if name.endswith(".content") and not isinstance(value, str | None):
            raise UserError(f"{path}: identity: {name}: given {value!r:.80}; allowed: the hash of a content")
    return Described(identity, sessions)


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file of JSON. Raises UserError for a file that is missing, cannot be read or holds something else."""
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        reason = reason_of(error, 120)
        raise UserError(f"{path}: cannot be parsed: {reason}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object; a run did not write this file")
    return content


def object_if_readable(path: Path) -> dict:
    """The object in a file of JSON, or an empty one: a machine that fails can leave the file empty."""
    try:
        return json_object(path)
    except UserError:
        return {}


def identity_if_readable(folder: Path) -> dict:
    """The identity of the run in a folder, or an empty one: reading the whole run reports what is wrong with the file."""
    try:
        return described(folder / RUN).identity
    except UserError:
        return {}


def read_text(path: Path) -> str:
    """The content of a file of a run folder. Raises UserError for a missing one, and for one that cannot be read."""
    content = read_regular(path)
    if content is None:
        runs = sorted(str(file.parent) for file in path.parent.glob(f"*/{path.name}"))  # the folder of several runs
        raise UserError(f"{path}: cannot be read: No such file or directory; a run folder has it next to its records"
                        + (f": {' or '.join(runs[:3])}" if runs else ""))
    return content.decode()


PROBLEMS = "problems.jsonl"


class ProblemText(TypedDict):
    """A line of `problems.jsonl`."""

    id: str
    """Id of the problem: `problem` of its records."""
    question: str
    """The question; for a conversation the last turn of the user."""
    gold: str
    """The correct answer as the dataset writes it."""
    prompt: str
    """The text that the model continues, before the tokenizer adds special tokens of its own."""
    plain: NotRequired[list[Annotated[tuple[int, int], files.AsList()]]]
    """Places (start, stop) of names of special tokens in it that stay text."""


_PROBLEM = Schema(ProblemText)


def read_problems(folder: Path) -> dict[str, ProblemText]:
    """The problems of a run by their ids; empty without the file. Raises UserError for a damaged file."""
    found = objects_of(folder / PROBLEMS, _PROBLEM, "delete the file, and the next start of the run writes it again")
    return {problem["id"]: cast(ProblemText, problem) for problem in found}


def add_problems(folder: Path, missing: Callable[[Collection[str]], Iterable[ProblemText]]) -> None:
    """Adds the problems that the file lacks. The caller holds the lock of the folder. Raises UserError.

    Args:
        missing: gives the run's problems except those with the given ids.
    """
    recorded = read_problems(folder)  # of earlier starts too, whose problems this one may not request
    if new := [*missing(recorded.keys())]:
        files.write_atomically(folder / PROBLEMS, as_lines([*recorded.values(), *new]))


def as_lines(problems: Iterable[ProblemText]) -> bytes:
    """The content of `problems.jsonl`."""
    return b"".join(map(to_line, problems))


def schema_in(folder: Path, given: Schema | None = None) -> Schema:
    """The schema of a run's records by its `run.json`: of samples, or of the units of its probe, with the run's hash.

    Without a readable `run.json` only the key of a record is checked, and that its numbers are finite.

    Args:
        given: a schema that is known.
    """
    identity = object_if_readable(folder / RUN).get("identity")  # what needs the file reports what is wrong with it
    if not isinstance(identity, dict):
        identity = {}
    if given is None:
        given = sample_schema() if identity and "probe" not in identity else unit_schema()
    return given.of_run(hash_of(identity) if identity else None)


def read_records(folder: Path, schema: Schema | None = None, damage: list[str] | None = None) -> list[Record]:
    """The records of a run, which may be in progress: those of `each_record`. Raises UserError for a damaged file or line."""
    return [record for _, record in each_record(folder, schema, damage)]


def each_record(folder: Path, schema: Schema | None = None, damage: list[str] | None = None) -> Iterator[tuple[Path, Record]]:
    """Yields the file and the record of each task of a run, the first one. A file is in the order of its process.

    Raises UserError for a damaged file or line.

    Args:
        schema: of the records; None for that of `schema_in`.
        damage: damaged lines and files are left out, and a sentence for each is added to this list; None raises.
    """
    places: dict[SampleKey, str] = {}
    of_run = schema_in(folder, schema)
    try:
        files = record_files(folder)
    except UserError as error:
        _note_damage(error, damage)
        files = record_files(folder, others=True)
    for path in files.values():
        try:
            for line_number, record in records_of(path, each_line(path), 0, of_run, damage):
                position, key = f"{path}: line {line_number + 1}", key_of(record)
                if key not in places:
                    places[key] = position
                    yield path, cast(Record, record)
                elif damage is None:
                    note_repeated(key, position, places[key])
                else:
                    damage.append(f"{position} repeats problem {key[0]}, chain {key[1]}")
        except UserError as error:
            _note_damage(error, damage)


def _note_damage(error: UserError, damage: list[str] | None) -> None:
    if damage is None:
        raise error
    damage.append(str(error))


def records_of(path: Path, lines: Iterable[bytes], before: int, schema: Schema,
               damaged: list[str] | None = None) -> Iterator[tuple[int, dict]]:
    """Yields the number of each line, from 0, and its record. Raises UserError for a damaged line.

    Args:
        lines: a part of the file.
        before: number of lines of the file before this part.
        damaged: takes a sentence for each damaged line, which is left out; None raises.
    """
    for line_number, line in enumerate(lines, start=before):
        try:
            record = schema.read(line)
        except Damaged as error:
            if damaged is None:
                raise UserError(f"{path}: line {line_number + 1}: {error}; repair=true in the command of the run moves "
                                f"damaged lines to {DAMAGED} and draws them again, and the report leaves them out with "
                                "--lenient") from error
            damaged.append(f"{path}: line {line_number + 1}: {error}")
            continue
        yield line_number, record


def record_line(record: Mapping[str, object], digest: str | None) -> bytes:
    """The line of a record with the hash of its run's identity, so that records of another run are noticed."""
    return to_line(record if digest is None else {**record, files.IDENTITY: digest})


def note_repeated(key: SampleKey, repeat: str, first: str) -> None:
    """Prints that a second record of a sample is ignored.

    If a file server takes a live process for dead, another process can draw the same sample, with the same randomness.
    """
    note(f"{repeat} repeats problem {key[0]}, chain {key[1]}; the record in {first} is used")


class Attempt(TypedDict):
    """A line of `attempts.jsonl`."""

    problem: str
    chain: Count
    begun: bool
    """Whether the task was begun, or given up gracefully."""


ATTEMPTS = Schema(Attempt)
TRACKED = "tracked.json"
"""What each tracker has received: for each file of records a number of lines."""


def move_damaged(folder: Path, schema: Schema) -> None:
    """Moves the damaged lines of all files of records and attempts of a folder, and prints how many and where.

    The caller is alone in the folder. A process that is killed here leaves every line in at least one of the two files.
    Raises UserError for a file that cannot be written.
    """
    moved = {path: _damaged(path, schema) for path in record_files(folder).values()}
    moved |= {path: _damaged(path, ATTEMPTS) for path in sorted(folder.glob("attempts*.jsonl"))}
    # Trackers first: a process that is killed between the two lets them log some records twice, and misses none.
    for file_number, path in record_files(folder).items():
        if moved[path]:
            _tell_trackers(folder / TRACKED, file_number, moved[path])
    for path, taken in moved.items():
        if taken:
            to = folder / DAMAGED
            every = list(each_line(path))
            with writing(to), files.open_to_extend(to) as file:
                file.write(b"".join(every[index] + b"\n" for index in sorted(taken)))
                os.fsync(file.fileno())
            files.write_atomically(path, b"".join(line + b"\n" for index, line in enumerate(every) if index not in taken))
            print(f"{path}: {len(taken)} damaged line{'s' * (len(taken) > 1)} moved to {DAMAGED} "
                  f"(line {', '.join(str(index + 1) for index in sorted(taken)[:10])}{', ...' * (len(taken) > 10)}); what "
                  "they recorded is done again", file=sys.stderr)


def _damaged(path: Path, schema: Schema) -> set[int]:
    """The numbers, from 0, of the damaged lines of a file."""
    line_numbers = set()
    for line_number, line in enumerate(each_line(path)):
        try:
            schema.read(line)
        except Damaged:
            line_numbers.add(line_number)
    return line_numbers


def _tell_trackers(path: Path, file_number: int, line_numbers: Iterable[int]) -> None:
    """Lowers the numbers of lines that trackers have received by those that are moved. The new records are then logged."""
    try:
        tracked = json_object(path) if is_there(path) else {}
    except UserError:  # the tracking reports it
        return
    for received in tracked.values():
        lines = received.get("lines") if isinstance(received, dict) else None
        count = lines.get(str(file_number)) if isinstance(lines, dict) else None
        if isinstance(lines, dict) and isinstance(count, int):
            lines[str(file_number)] = count - sum(index < count for index in line_numbers)
            received["summary"] = None
    files.write_atomically(path, json.dumps(tracked) + "\n")
