"""What describes a run beside its records: `run.json`, `config.yaml`, and `problems.jsonl` with question and prompt of each.

The file of problems is replaced as a whole and under the lock of the folder. So it is never partial, and processes that share
a run write each problem once. A process writes it before its first record, so that every record's problem is in it.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, cast

from typing_extensions import TypedDict

from dflash_mcmc.errors import UserError, reason_of
from dflash_mcmc.store.files import objects_of, read_regular, write_atomically
from dflash_mcmc.store.schema import AsList, Schema, to_line

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
        content = json.loads(text_of(path))
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


def text_of(path: Path) -> str:
    """The content of a file of a run folder. Raises UserError for a missing one, and for one that cannot be read."""
    content = read_regular(path)
    if content is None:
        runs = sorted(str(file.parent) for file in path.parent.glob(f"*/{path.name}"))  # the folder of several runs
        raise UserError(f"{path}: cannot be read: No such file or directory; a run folder has it next to its records"
                        + (f": {' or '.join(runs[:3])}" if runs else ""))
    return content.decode()


PROBLEMS = "problems.jsonl"


class ProblemText(TypedDict):
    """A line of the file."""

    id: str
    """Id of the problem: `problem` of its records."""
    question: str
    """The question; for a conversation the last turn of the user."""
    gold: str
    """The correct answer as the dataset writes it."""
    prompt: str
    """The text that the model continues, before the tokenizer adds special tokens of its own."""
    plain: NotRequired[list[Annotated[tuple[int, int], AsList()]]]
    """Places (start, stop) of names of special tokens in it that stay text."""


_SCHEMA = Schema(ProblemText)


def read_problems(folder: Path) -> dict[str, ProblemText]:
    """The problems of a run by their ids; empty without the file. Raises UserError for a damaged file."""
    found = objects_of(folder / PROBLEMS, _SCHEMA, "delete the file, and the next start of the run writes it again")
    return {problem["id"]: cast(ProblemText, problem) for problem in found}


def add_problems(folder: Path, missing: Callable[[Collection[str]], Iterable[ProblemText]]) -> None:
    """Adds the problems that the file lacks. The caller holds the lock of the folder. Raises UserError.

    Args:
        missing: gives the run's problems except those with the given ids.
    """
    recorded = read_problems(folder)  # of earlier starts too, whose problems this one may not request
    if new := [*missing(recorded.keys())]:
        write_atomically(folder / PROBLEMS, as_lines([*recorded.values(), *new]))


def as_lines(problems: Iterable[ProblemText]) -> bytes:
    """The content of the file."""
    return b"".join(map(to_line, problems))
