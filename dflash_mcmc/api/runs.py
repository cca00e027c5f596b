"""Runs from Python: made as on the command line, read as tables, and compared."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_mcmc.api.choices import configuration, override
from dflash_mcmc.api.sampling import Sample
from dflash_mcmc.config.identity import configuration_of, varying, with_names
from dflash_mcmc.config.schema import Job
from dflash_mcmc.errors import ConfigError, UserError, note
from dflash_mcmc.grading import Grader
from dflash_mcmc.grading.verdicts import UNDRAWN
from dflash_mcmc.report import reading
from dflash_mcmc.runner.loop import execute
from dflash_mcmc.store.records import RUN, described, identity_if_readable, read_problems, read_records
from dflash_mcmc.types import Grade, RunResult

if TYPE_CHECKING:
    import pandas as pd

Folder = str | Path | RunResult
"""A run: its folder, or the result of `run`."""
_NOTHING = {"log_p": math.nan, "num_tokens": math.nan}
"""Fields of a record without a text."""


def run(*overrides: str, **fields: Any) -> RunResult:
    """Makes one run as `python -m dflash_mcmc OVERRIDES...` does, and returns its folder and its summary.

    A run that is complete draws nothing. Ctrl-C keeps the recorded samples, and the same call continues.

    Args:
        overrides: as on the command line, such as `"condition=ps", "dataset.limit=8"`.
        fields: overrides whose names have no dot, such as `condition="ps", num_chains=4`.

    Raises:
        UserError: for what the command line refuses, with its message, and for overrides that are not one run.
    """
    from dflash_mcmc.runner.plan import checked

    if not all(isinstance(text, str) for text in overrides):
        raise UserError(f"run: given {overrides!r:.120}; allowed: texts, such as run('condition=ps', 'dataset.limit=8'), or "
                        "run(*overrides) for a list")
    overrides = (*overrides, *(override(name, value) for name, value in fields.items()))
    command = checked(list(overrides))
    only_shown = command.shows or any(job.config.dry_run or job.config.show for job in command.jobs)
    if only_shown or command.is_sweep or command.launcher:
        raise UserError(f"run: given {' '.join(overrides)!r:.120}; allowed: the overrides of one run that is made here. "
                        "Several runs are made by sweep; jobs of SLURM, dry_run and show are for the command line")
    result = execute(command.jobs[0])
    if result.num_beyond:
        note(f"{result.folder}: {result.num_beyond} recorded {result.unit}s that were not requested are counted as well")
    return result


def sweep(*overrides: str, **fields: Any) -> list[RunResult]:
    """Makes the runs of a sweep as `python -m dflash_mcmc -m OVERRIDES...` does, and returns them in the order of its points.

    Points that do the same give one result. The same call continues a sweep that was stopped.

    Args:
        overrides: as on the command line, such as `"condition=greedy,ps", "sampler.alpha=2,4"`, or `"sweep=alpha_beta"`.
        fields: overrides whose names have no dot; a list has the values of several points: `condition=["greedy", "ps"]`.

    Raises:
        UserError: for what the command line refuses, and after the last point if some have failed.
    """
    from dflash_mcmc.config.command import report, run_jobs
    from dflash_mcmc.runner.plan import checked

    command = checked(["-m", *overrides, *(_swept(name, value) for name, value in fields.items())])
    if command.launcher or any(job.config.dry_run or job.config.show for job in command.jobs):
        raise UserError(f"sweep: given {' '.join(overrides)!r:.120}; allowed: points that are run here. Jobs of SLURM, "
                        "dry_run and show are for the command line")
    results = list[RunResult]()

    def executed(job: Job) -> RunResult:
        results.append(execute(job))
        return results[-1]

    if report(run_jobs(command.jobs, executed)):
        raise UserError("sweep: points have failed, for the reasons above; the others are recorded")
    return results


def _swept(name: str, value: Any) -> str:
    """The override of a field; a list has the values of several points."""
    written = [override(name, each) for each in (value if isinstance(value, list) else [value])]
    return ",".join([written[0], *(text.removeprefix(f"{name}=") for text in written[1:])]) if written else f"{name}="


def write_report(*folders: Folder, baseline: str | None = None, out: str | Path | None = None) -> Path:
    """Writes the report of runs as `python -m dflash_mcmc.report` does, and returns its page.

    Args:
        folders: run folders, experiment folders, or results of `run` and `sweep`.
        baseline: the run that all others are compared with, by label, condition or identity; None takes greedy.
        out: the folder to write to; None takes `report` in the folder of the runs.

    Raises:
        UserError: for a folder without runs, or with files that cannot be read.
    """
    from dflash_mcmc.report.build import build

    built = build([_folder(folder) for folder in folders], None if out is None else Path(out), baseline=baseline)
    for warning in built.parts[0].warnings:
        note(warning)
    return built.page


def grade(answers: Sequence[Sample | str], golds: Sequence[str] | Mapping[str, str],
          grader: Grader | str = "math") -> list[Grade]:
    """The verdict of each answer, by the rules of a run.

    Args:
        answers: samples of `sample`, or texts.
        golds: the gold answer of each prompt, in the order of the prompts or by their ids; of texts, one for each.
        grader: a component or a name; `dm.MathGrader(extract="auto")` reads answers without a box.

    Raises:
        UserError: for an answer without a gold answer, a gold answer that no text can be compared with, and what the grader
            refuses.
    """
    grades, rules = dict[int, Grade](), configuration({"grader": grader}, {}).grader
    with closing(rules.start()) as pool:
        for index, answer in enumerate(answers):
            name, number, text = (index, index, answer) if isinstance(answer, str) else (answer.id, answer.prompt, answer.text)
            if not (name in golds if isinstance(golds, Mapping) else number < len(golds)):
                raise ConfigError("golds", f"none for {name!r}", "a gold answer for each prompt")
            rules.check_gold(gold := golds[str(name)] if isinstance(golds, Mapping) else golds[number])
            if not isinstance(answer, str) and answer.finish_reason in UNDRAWN:
                grades[index] = Grade(answer.finish_reason, None, reason=answer.failure)
            else:
                pool.submit(index, text, gold)
        grades.update(pool.finished(wait=True))
    return [grades[index] for index in range(len(answers))]


def read(*folders: Folder) -> "pd.DataFrame":
    """The records of runs as a table of pandas, a row for each record.

    The first column, `run`, is the run's label as in a report, or the name of the folder of a probe's run. Each setting in
    which the runs differ has a column, such as `sampler.alpha`, with its value in every run. The others are the fields of the
    records (`docs/reference/run-folder.md`), such as `problem`, `chain`, `verdict`, `gold`, `text` and `log_p`, and the
    `question`, if the run has its problems. `log_p` and `num_tokens` of a record without a text (`not_drawn`, `too_long`) are
    NaN, so that means leave it out.

    Args:
        folders: run folders, experiment folders, or results of `run`.

    Raises:
        UserError: for a folder without runs or with files that cannot be read, and where pandas is missing.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise UserError("pandas: is not installed, and a table of records needs it; allowed: pip install pandas") from error
    entries = reading.run_folders([_folder(folder) for folder in folders])
    probed = [entry for entry in entries if "probe" in identity_if_readable(entry.folder)]
    sampled = [entry for entry in entries if entry not in probed]
    labelled = {entry.folder: (entry.folder.name, read_records(entry.folder)) for entry in probed}
    for drawn in reading.read(sampled)[0] if sampled else []:
        labelled[drawn.folder] = drawn.label, drawn.records
    settings = _differing(list(labelled))
    return pd.DataFrame([{"run": label, **settings[folder], **row} for folder, (label, records) in labelled.items()
                         for row in _rows(folder, records)])


def _differing(folders: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """For each run the settings in which the runs differ, by dotted name."""
    if len(folders) < 2:
        return {folder: {} for folder in folders}
    identities = with_names([described(folder / RUN).identity for folder in folders],
                            [configuration_of(folder) for folder in folders])
    names = varying(identities)
    return {folder: {name: identity.get(name) for name in names} for folder, identity in zip(folders, identities, strict=True)}


def _rows(folder: Path, records: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The records of a run and their questions; a sample without a text has no log p."""
    problems = read_problems(folder)
    for record in records:
        problem = problems.get(str(record.get("problem")))
        nothing = _NOTHING if "ended" in record and record["verdict"] in UNDRAWN else {}  # a probe's record has no text
        yield {**record, **nothing, **({"question": problem["question"]} if problem else {})}


def compare(*logs: Folder, score: str | None = None) -> "pd.DataFrame":
    """Compares logs with the first of them, problem by problem, as `python -m dflash_mcmc.compare` does.

    A row for each log, whose columns are `report.comparison.COLUMNS`. The test is the exact McNemar test, or a permutation
    test where problems have several samples. Problems that a log and the first do not share are left out, and a line says so.

    Args:
        logs: runs, run folders, and logs of Inspect, of lm-evaluation-harness, in CSV or JSON Lines
            (`report/comparison.py`), each also as "NAME=PATH".
        score: the score to compare, where a log has several.

    Raises:
        UserError: for what is no log, fewer than two logs, and logs without a common problem.
    """
    import pandas as pd

    from dflash_mcmc.report.comparison import compared, read_all

    found = compared(read_all([str(_folder(log)) for log in logs], score))
    for line in found.notes:
        note(f"compare: {line}")
    return pd.DataFrame(found.table.rows)


def _folder(folder: Folder) -> Path:
    return folder.folder if isinstance(folder, RunResult) else Path(folder)
