"""Scores by problem and sample from anybody's logs: Inspect, lm-evaluation-harness, CSV, JSON Lines, and run folders.

Inspect writes `.eval` (a zip archive, whose `summaries.json` has the scores) and `.json`; lm-evaluation-harness writes
`samples_TASK_DATE.jsonl` with `--log_samples`. Other files have a line for each sample, with a field of `PROBLEM`, one of
`SCORE` and, where a problem has several samples, one of `CHAIN`.
"""

from __future__ import annotations

import csv
import json
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from dflash_mcmc.errors import UserError, did_you_mean, reason_of
from dflash_mcmc.statistics.outcomes import PairedOutcomes

PROBLEM = ("problem", "id", "problem_id", "question_id", "task_id", "sample_id", "doc_id")
SCORE = ("score", "correct", "is_correct", "passed", "verdict", "acc", "exact_match")
"""The fields of a problem and of a score in files of no known tool: the first that the lines have."""
CHAIN = ("chain", "epoch", "sample", "repeat")
"""The field of the number of a sample of a problem. Without one, samples are numbered as they come."""
_VALUES = {"c": 1.0, "correct": 1.0, "true": 1.0, "yes": 1.0, "p": 0.5, "i": 0.0, "n": 0.0, "incorrect": 0.0, "wrong": 0.0,
           "false": 0.0, "no": 0.0}
"""The words for scores: those of Inspect (C, P, I, N), verdicts and truth values."""
_FORMATS = ("a run folder, a log of Inspect (.eval, .json), samples_*.jsonl of lm-evaluation-harness, or .csv and .jsonl with "
            "a problem and a score in each line")
_ZSTANDARD = 93


class Log(NamedTuple):
    """The scores of one log."""

    name: str
    scores: dict[str, list[float]]
    """The scores of each problem's samples, by the id of the problem, in order of first appearance."""
    unscored: int = 0
    """Samples without a score, which are left out: those that an error has ended."""

    def outcomes(self, low: float = 0.0, high: float = 1.0) -> PairedOutcomes:
        """The means by problem, with scores from `low` to `high` as 0 to 1."""
        means = [(sum(scores) / len(scores) - low) / (high - low) for scores in self.scores.values()]
        return PairedOutcomes(tuple(self.scores), np.array(means), np.array([len(each) for each in self.scores.values()]))


class _ScoredSample(NamedTuple):
    problem: object
    chain: object
    scores: Mapping[str, Any]
    """By the name of the score; empty for a sample that has none."""


def read_all(given: Sequence[str], score: str | None = None) -> list[Log]:
    """Reads logs, each given as PATH or NAME=PATH. Raises UserError; see `read`."""
    logs = []
    for text in given:
        name, path = text.partition("=")[::2] if "=" in text and not Path(text).exists() else ("", text)
        log = read(Path(path), score)
        logs.append(log._replace(name=name or log.name))
        if log.name in (other.name for other in logs[:-1]) and not name:
            raise UserError(f"{path}: has the name {log.name!r} of another log; allowed: NAME={path}")
    return logs


def read(path: Path, score: str | None = None) -> Log:
    """Reads a log. Raises UserError for a file that is none, and for several scores of which none is named.

    Args:
        score: the name of the score: a scorer of Inspect, a metric, a filter or `FILTER/METRIC` of lm-evaluation-harness, or a
            field. None takes the only one.
    """
    if path.is_dir():
        return _run(path)
    try:
        samples = list(_samples(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {reason_of(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, csv.Error, RecursionError) as error:
        raise UserError(f"{path}: is not {_FORMATS} ({reason_of(error)})") from error
    names = list(dict.fromkeys(name for sample in samples for name in sample.scores))
    if not names:
        raise UserError(f"{path}: has no sample with a score; allowed: {_FORMATS}")
    chosen = [name for name in names if score is None or score in (name, *name.split("/"))]
    if len(chosen) != 1:
        given = "--score: not given" if score is None else f"--score: given {score!r}{did_you_mean(score, names)}"
        raise UserError(f"{given}; allowed for {path}: {', '.join(chosen or names)}")
    found: dict[str, dict[object, float]] = {}
    unscored = 0
    for sample in samples:
        if (value := sample.scores.get(chosen[0])) is None:
            unscored += 0 if sample.scores else 1  # of another filter, else without any
            continue
        of_problem = found.setdefault(str(sample.problem), {})
        chain = len(of_problem) if sample.chain is None else sample.chain
        if chain in of_problem:
            raise UserError(f"{path}: problem {sample.problem} has sample {chain} twice; allowed: each once")
        of_problem[chain] = _number(value, path, chosen[0])
    return Log(path.stem, {problem: list(scores.values()) for problem, scores in found.items()}, unscored)


def _number(value: object, path: Path, name: str) -> float:
    """A score as a number. Raises UserError for any other value."""
    if isinstance(value, str):
        value = _VALUES.get(value.strip().lower(), value)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = np.nan
    if not np.isfinite(number):
        raise UserError(f"{path}: score {name}: given {value!r:.80}; allowed: a number, C, I, P, N, true, false, correct or "
                        "wrong")
    return number


def _run(folder: Path) -> Log:
    from dflash_mcmc.report import reading
    from dflash_mcmc.statistics.outcomes import by_problem, score

    runs = reading.read(reading.run_folders([folder]))[0]
    if len(runs) > 1:
        raise UserError(f"{folder}: has {len(runs)} runs; allowed: the folder of one run, such as {runs[0].folder}")
    of_problems = by_problem(runs[0].records)
    return Log(runs[0].label, {name: [score(record) for record in records] for name, records in of_problems.items()})


def _samples(path: Path) -> Iterator[_ScoredSample]:
    if path.suffix == ".eval":
        yield from _inspect(json.loads(_member(path, "summaries.json")))
    elif path.suffix == ".json":
        yield from _inspect(json.loads(path.read_text())["samples"])
    elif path.suffix == ".csv":
        with path.open(newline="") as file:
            csv.field_size_limit(2**31 - 1)
            yield from _lines(list(csv.DictReader(file)))
    else:
        yield from _lines([json.loads(line) for line in path.read_text().splitlines() if line.strip()])


def _inspect(samples: Iterable[Mapping[str, Any]]) -> Iterator[_ScoredSample]:
    for sample in samples:
        scores = sample.get("scores") or {}  # null where an error has ended the sample
        yield _ScoredSample(sample["id"], sample["epoch"], {name: score["value"] for name, score in scores.items()})


def _lines(lines: Sequence[Mapping[str, Any]]) -> Iterator[_ScoredSample]:
    if lines and {"doc_id", "metrics"} <= lines[0].keys():  # lm-evaluation-harness: a line for each document and filter
        for line in lines:
            yield _ScoredSample(line["doc_id"], None, {f"{line['filter']}/{name}": line[name] for name in line["metrics"]})
        return
    fields = {field for line in lines for field in line}
    problem, chain = (next((name for name in names if name in fields), None) for names in (PROBLEM, CHAIN))
    if problem is None:
        raise UserError(f"a line has the fields {', '.join(sorted(fields)) or 'none'}; allowed: {', '.join(PROBLEM)} for the "
                        f"problem, and {', '.join(SCORE)} for the score")
    named = [name for name in SCORE if name in fields][:1] or sorted(fields - {problem, chain})
    for line in lines:
        yield _ScoredSample(line[problem], None if chain is None else line.get(chain),
                      {name: line[name] for name in named if line.get(name) not in (None, "")})


def _member(path: Path, name: str) -> bytes:
    """The content of a file in a zip archive. Inspect compresses with Zstandard, which Python's zipfile reads from 3.14 on."""
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(name)
        if member.compress_type != _ZSTANDARD:
            return archive.read(member)
    with path.open("rb") as file:
        return _decompressed(file, member)


def _decompressed(file: IO[bytes], member: zipfile.ZipInfo) -> bytes:
    import pyarrow as pa

    file.seek(member.header_offset + 26)  # of the local header, whose name and extra field have lengths of their own
    name, extra = struct.unpack("<HH", file.read(4))
    file.seek(name + extra, 1)
    return pa.decompress(file.read(member.compress_size), member.file_size, "zstd", asbytes=True)
