"""Paired comparisons of logs with the first of them: `python -m dflash_mcmc.compare`, and `compare` in Python.

Each log is compared on the problems that it shares with the first. Several samples of a problem are one cluster. The tests and
intervals are those of a report (`statistics/paired.py`), and p is adjusted for all comparisons (Holm 1979).

Logs are anybody's: Inspect, lm-evaluation-harness, CSV, JSON Lines, and run folders. Inspect writes `.eval` (a zip archive,
whose `summaries.json` has the scores) and `.json`; lm-evaluation-harness writes `samples_TASK_DATE.jsonl` with
`--log_samples`. Other files have a line for each sample, with a field of `PROBLEM`, one of `SCORE` and, where a problem has
several samples, one of `CHAIN`.
"""

import csv
import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.errors import UserError, did_you_mean, reason_of
from dflash_mcmc.report import figure, parts, reading
from dflash_mcmc.statistics.estimates import IntervalEstimate, PairedOutcomes, accuracy_of, aligned, by_problem, score
from dflash_mcmc.statistics.paired import VarianceParts, compare

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
        word = value.strip().lower() if isinstance(value, str) else ""
        try:
            points = float(_VALUES.get(word, value))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            points = np.nan
        if not np.isfinite(points):
            raise UserError(f"{path}: score {chosen[0]}: given {value!r:.80}; allowed: a number, C, I, P, N, true, false, "
                            "correct or wrong")
        of_problem[chain] = points
    return Log(path.stem, {problem: list(scores.values()) for problem, scores in found.items()}, unscored, chosen[0])


def _run(folder: Path) -> Log:
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


COLUMNS = ("run", "problems", "samples", "accuracy", "accuracy_low", "accuracy_high", "baseline", "common", "difference",
           "difference_low", "difference_high", "won", "lost", "p_value", "p_holm", "test", "verdict", "problems_needed")
"""Accuracies and differences are shares, over problems, with 95 % intervals. `won` and `lost` count the common problems whose
mean is above and below that of the baseline. `problems_needed` detects a difference of this size at p = 0.05 with 80 % power,
with as many chains of a problem as here."""
_METHOD = ("Each log is compared with the first on the problems that both have; the samples of a problem are one cluster. "
           "With one verdict a problem the test is McNemar's exact test, else a permutation of the signs of the differences. "
           "Intervals are Student's over problems, adjusted for few problems (Bonett & Price 2012). p (Holm) is adjusted for "
           "all comparisons; a difference is resolved if it is at most 0.05.")


class Comparison(NamedTuple):
    """Compared logs."""

    table: parts.ReportTable
    """A row for each log with the columns of `COLUMNS`; that of the baseline has no difference."""
    notes: list[str]
    """Lines on what was left out."""

    def write(self, folder: Path) -> Path:
        """Writes the page, its table and its figure as a report does, and returns the page. Raises UserError."""
        from dflash_mcmc.report.build import write

        title = f"Differences to {self.table.rows[0]['run']} with 95 % intervals."
        drawing = parts.Drawing("fig_differences", title, self._figure)
        section = parts.Section("comparison", "Compared with the first log", [_METHOD], [self.table], [drawing])
        part = parts.ReportPart("", f"{len(self.table.rows)} logs.", self.notes, [section])
        write(folder, "Paired comparison", [part], ["pdf"])
        return folder / "report.html"

    def _figure(self) -> "figure.Figure":
        base, *rows = self.table.rows
        panel = ("", f"difference to {base['run']} (points), 95 % interval",
                 [IntervalEstimate.of(row, "difference") for row in rows], [row["verdict"] for row in rows])
        return figure.estimates([row["run"] for row in rows], panel, line=(0.0, "-"),
                                strong=[row["verdict"] in ("better", "worse") for row in rows])


def compared(logs: Sequence[Log]) -> Comparison:
    """Compares each log with the first. Raises UserError for fewer than two, and for logs without a problem in common."""
    if len(logs) < 2:
        raise UserError(f"compare: given {len(logs)} log; allowed: at least two, the first of which is the baseline")
    every = [score for log in logs for scores in log.scores.values() for score in scores]
    low, high = min(0.0, *every), max(1.0, *every)  # scores that are no verdicts have a range of their own
    notes = [f"{log.name}: {log.unscored} samples without a score are left out" for log in logs if log.unscored]
    if (low, high) != (0.0, 1.0):
        notes.append(f"scores reach from {low:g} to {high:g}, and are shown as shares of this range")
    outcomes, base, rows = [log.outcomes(low, high) for log in logs], logs[0], list[dict[str, Any]]()
    for log, own in zip(logs, outcomes, strict=True):
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {"run": log.name, "problems": len(own.problems), "samples": int(own.chains.sum()),
                **accuracy_of(own).columns("accuracy")}
        rows.append(row)
        if log is base:
            continue
        one, other, left_out = aligned(own, outcomes[0])
        if not one.problems:
            raise UserError(f"{log.name}: has no problem in common with {base.name}: {own.problems[0]!r}, ... and "
                            f"{outcomes[0].problems[0]!r}, ...; allowed: logs with the same ids of problems")
        if left_out:
            notes.append(f"{log.name}: {left_out} problems are left out, because only one of it and {base.name} has them")
        pair, sides = compare(one, other), np.sign(np.round(one.correct - other.correct, 12))
        row |= {"baseline": base.name, "common": len(one.problems), **parts.differences(pair), "won": int((sides > 0).sum()),
                "lost": int((sides < 0).sum()), "test": pair.test}
        if pair.difference.known and np.ptp(one.correct - other.correct) > 0.0:
            chains = int(max(one.chains.min(), other.chains.min()))
            row["problems_needed"] = VarianceParts.of(one, other).problems_needed(abs(pair.difference.known), chains)
    parts.adjusted(rows)
    return Comparison(parts.ReportTable("comparison", "Paired comparison", {
        "run": "run", "problems": ("problems", "count"), "samples": ("samples", "count"), "accuracy": ("accuracy", "share"),
        "difference (points)": ("difference", "points"), "won": ("won", "count"), "lost": ("lost", "count"), **parts.P_VALUES,
        "verdict": "verdict", "problems needed": ("problems_needed", "count")}, rows), notes)
