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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    score: str = ""
    """The name of the score, where the log names its scores."""

    def outcomes(self, low: float = 0.0, high: float = 1.0) -> PairedOutcomes:
        """The means by problem, with scores from `low` to `high` as 0 to 1."""
        means = [(sum(scores) / len(scores) - low) / (high - low) for scores in self.scores.values()]
        return PairedOutcomes(tuple(self.scores), np.array(means), np.array([len(each) for each in self.scores.values()]))


_Sample = tuple[object, object, Mapping[str, Any]]
"""A problem, the number of a sample, and its scores by their names; no scores for a sample that has none."""


def read_all(given: Sequence[str], score: str | None = None) -> list[Log]:
    """Reads logs, each given as PATH or NAME=PATH. Raises UserError; see `read`."""
    logs = []
    for text in given:
        name, path = text.partition("=")[::2] if "=" in text and not Path(text).exists() else ("", text)
        log = read(Path(path), score)
        logs.append(log._replace(name=name or log.name))
        if log.name in (other.name for other in logs[:-1]) and not name:
            raise UserError(f"{path}: has the name {log.name!r} of another log; allowed: NAME={path}")
    named = [log.score for log in logs if log.score]
    if score is not None and not any(score in (name, *name.split("/")) for name in named):
        raise UserError(f"--score: given {score!r}{did_you_mean(score, named)}; allowed: {', '.join(named) or 'none'}")
    return logs


def read(path: Path, score: str | None = None) -> Log:
    """Reads a log. Raises UserError for a file that is none, and for several scores of which none is named.

    Args:
        score: the name of the score: a scorer of Inspect, a metric, a filter or `FILTER/METRIC` of lm-evaluation-harness, or a
            field. A log with one score has that one.
    """
    if path.is_dir():
        return _run(path)
    try:
        samples = _samples(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {reason_of(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, csv.Error, RecursionError) as error:
        raise UserError(f"{path}: is not {_FORMATS} ({reason_of(error)})") from error
    names = list(dict.fromkeys(name for *_, scores in samples for name in scores))
    if not names:
        raise UserError(f"{path}: has no sample with a score; allowed: {_FORMATS}")
    chosen = [name for name in names if len(names) == 1 or score is None or score in (name, *name.split("/"))]
    if len(chosen) != 1:
        given = "--score: not given" if score is None else f"--score: given {score!r}{did_you_mean(score, names)}"
        raise UserError(f"{given}; allowed for {path}: {', '.join(chosen or names)}")
    found: dict[str, dict[object, float]] = {}
    unscored = 0
    for problem, number, scores in samples:
        if (value := scores.get(chosen[0])) is None:
            unscored += 0 if scores else 1  # of another filter, else without any
            continue
        of_problem = found.setdefault(str(problem), {})
        chain = len(of_problem) if number is None else number
        if chain in of_problem:
            raise UserError(f"{path}: problem {problem} has sample {chain} twice; allowed: each once")
        of_problem[chain] = _number(value, path, chosen[0])
    return Log(path.stem, {problem: list(scores.values()) for problem, scores in found.items()}, unscored, chosen[0])


def _number(value: object, path: Path, name: str) -> float:
    """A score as a number. Raises UserError for any other value."""
    word = value.strip().lower() if isinstance(value, str) else ""
    try:
        number = float(_VALUES.get(word, value))  # type: ignore[arg-type]
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


def _samples(path: Path) -> list[_Sample]:
    if path.suffix in (".eval", ".json"):
        samples = json.loads(_summaries(path)) if path.suffix == ".eval" else json.loads(path.read_text())["samples"]
        return [(sample["id"], sample["epoch"], {  # scores are null where an error has ended the sample
            name: score["value"] for name, score in (sample.get("scores") or {}).items()}) for sample in samples]
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            csv.field_size_limit(2**31 - 1)
            lines: list[dict[str, Any]] = list(csv.DictReader(file))
    else:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if lines and {"doc_id", "metrics"} <= lines[0].keys():  # lm-evaluation-harness: a line for each document and filter
        return [(line["doc_id"], None, {f"{line['filter']}/{name}": line[name] for name in line["metrics"]}) for line in lines]
    fields = {field for line in lines for field in line}
    problem, chain = (next((name for name in names if name in fields), None) for names in (PROBLEM, CHAIN))
    if problem is None:
        raise UserError(f"a line has the fields {', '.join(sorted(fields)) or 'none'}; allowed: {', '.join(PROBLEM)} for the "
                        f"problem, and {', '.join(SCORE)} for the score")
    named = [name for name in SCORE if name in fields][:1] or sorted(fields - {problem, chain})
    return [(line[problem], None if chain is None else line.get(chain),
             {name: line[name] for name in named if line.get(name) not in (None, "")}) for line in lines]


def _summaries(path: Path) -> bytes:
    """The scores in an archive of Inspect, which compresses with Zstandard; Python's zipfile reads it from 3.14 on."""
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("summaries.json")
        if member.compress_type != _ZSTANDARD:
            return archive.read(member)
    import pyarrow as pa

    with path.open("rb") as file:
        file.seek(member.header_offset + 26)  # of the local header, whose name and extra field have lengths of their own
        file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
        return pa.decompress(file.read(member.compress_size), member.file_size, "zstd", asbytes=True)
