"""A browser of all samples: what was asked, and the answers of the runs side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_mcmc.errors import UserError
from dflash_mcmc.fields import restored, spec_of
from dflash_mcmc.registry import components
from dflash_mcmc.report.parts import Section, paragraphs
from dflash_mcmc.report.samples import AskedProblem, samples_of

if TYPE_CHECKING:
    from dflash_mcmc.report.runs import Run
    from dflash_mcmc.report.study import Study

_TEXT = """
Every problem has a row and every run a column. A row opens the problem: question, prompt, gold answer, and the answers side by
side, each with its verdict and the grading rule, the reason why it ended, and log p after each step of the sampler, block by
block. The browser needs JavaScript and no network.
"""


def section(study: Study) -> Section:
    """The browser over all runs of the study."""
    asked, without = _asked(study.runs)
    found = samples_of(study.runs, asked)
    text = paragraphs(_TEXT)
    most = max(run.num_chains for run in study.runs)
    if found.num_chains < most:
        text.append(f"The browser has the first {found.num_chains:,} of {most:,} chains of each problem; all are in the run "
                    "folders.")
    if found.longest is not None:
        text.append(f"Answers are cut after {found.longest:,} characters here; they are whole in the run folders.")
    for reason in dict.fromkeys(why for _, why in without):
        labels = ", ".join(run.label for run, why in without if why == reason)
        text.append(f"Questions and prompts of these runs are not shown, since their folders have no problems.jsonl and their "
                    f"dataset cannot be read here{reason}: {labels}.")
    return Section("samples", "Samples", text, samples=found)


def _asked(runs: Sequence[Run]) -> tuple[dict[str, AskedProblem], list[tuple[Run, str]]]:
    """Question and prompts of each problem, and the runs that do not have them, with a reason."""
    questions: dict[str, str] = {}
    prompts: dict[str, dict[str, list[int]]] = {}
    without = []
    for number, run in enumerate(runs):
        for problem, text in run.asked.items():
            questions.setdefault(problem, text["question"])
            prompts.setdefault(problem, {}).setdefault(text["prompt"], []).append(number)
        if not run.asked:
            read, why = _of_dataset(run)
            for problem, question in read.items():
                questions.setdefault(problem, question)
            without += [] if read else [(run, why)]
    known = {problem for run in runs for problem in run.problems}
    missing = [(run, why) for run, why in without if not set(run.problems) <= questions.keys()]
    return {problem: AskedProblem(question, list(prompts.get(problem, {}).items()))
            for problem, question in questions.items() if problem in known}, missing


def _of_dataset(run: Run) -> tuple[Mapping[str, str], str]:
    """The questions of a run of an older version, from a dataset of the package or a local file. No network is used."""
    fields = dict(run.config.get("dataset") or {})
    component = components("dataset").get(str(fields.get("name")))
    if component is None:
        return {}, ""
    names = {field.name: field for field in dataclasses.fields(component.cls)}
    if "path" in names and not (isinstance(fields.get("path"), str) and Path(fields["path"]).is_file()):
        return {}, ""
    given = {name: fields.get(name, spec_of(field).in_older_runs()) for name, field in names.items()}
    try:
        problems = restored(component.cls, given).all_problems()
    except UserError as error:
        return {}, f" ({error})"
    return {problem.id: problem.question for problem in problems}, ""
