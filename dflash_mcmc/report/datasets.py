"""The datasets of a report. Runs are compared only with runs over the same dataset; each dataset is a part of the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from dflash_mcmc.config.labels import name_of_path
from dflash_mcmc.errors import UserError
from dflash_mcmc.report.parts import Column, Section, Table, paragraphs, percent
from dflash_mcmc.report.reading import Run, labelled
from dflash_mcmc.report.study import Study, named, study_of
from dflash_mcmc.statistics.outcomes import accuracy

_TEXT = """
Each dataset has a part of this page, and runs are compared only within it. An empty cell means that no such run is here.
"""


class DatasetRuns(NamedTuple):
    """Runs over one dataset."""

    name: str
    """Name of the dataset; with others of this name, that of its file, or a number. Names of files begin with it."""
    runs: list[Run]


def by_dataset(runs: Sequence[Run]) -> tuple[list[DatasetRuns], list[str]]:
    """The runs by their datasets, in order of first appearance, and a sentence for each dataset that has two versions.

    Two runs are over one dataset if their dataset has the same name, and the same content or a problem in common. Problems
    with the same id and other answers are other problems. Raises UserError if records disagree with their dataset.
    """
    groups: list[list[Run]] = []
    golds: list[dict[str, str]] = []
    notes: list[str] = []
    for run in runs:
        own = {record["problem"]: record["gold"] for record in run.records}
        versions: list[str] = []
        place = next((place for place, group in enumerate(groups) if _belongs(run, own, group, golds[place], versions)), None)
        if place is None:
            notes += versions
            groups.append([run])
            golds.append(own)
        else:
            groups[place].append(run)
            golds[place] |= own
    names = _names([group[0] for group in groups])
    several = len(groups) > 1
    return [DatasetRuns(name, labelled(group) if several else group) for name, group in zip(names, groups, strict=True)], notes


def _belongs(run: Run, own: dict[str, str], group: list[Run], golds: dict[str, str], versions: list[str]) -> bool:
    """Whether a run is over the dataset of a group. Adds a sentence if it has another version of this dataset.

    Args:
        own: the gold answers of the run's problems.
        golds: those of the group's problems.
    """
    first = group[0]
    if run.component("dataset") != first.component("dataset"):
        return False
    content = run.identity.get("dataset.content")
    alike = any(content == other.identity.get("dataset.content") for other in group)
    other = next((problem for problem in own if golds.get(problem, own[problem]) != own[problem]), None)
    if other is None:
        return alike or not own.keys().isdisjoint(golds)
    said = f"problem {other!r} has the answer {golds[other]!r} in {first.folder} and {own[other]!r} in {run.folder}"
    if alike:
        raise UserError(f"runs: {said}, though both say that their dataset is the same; allowed: records as a run wrote them")
    if _file(run) == _file(first):
        versions.append(f"two versions of {run.component('dataset')} are here: {said}; they are separate datasets")
    return False


def _file(run: Run) -> str:
    """The name of the dataset's file or its hub name; empty for a dataset without one."""
    return name_of_path((run.config.get("dataset") or {}).get("path"))


def _names(firsts: Sequence[Run]) -> list[str]:
    """A name for each dataset, by its first run. Datasets of one name have the names of their files, or else numbers."""
    names = [run.component("dataset") for run in firsts]
    paths = list(map(_file, firsts))
    names = [path if path and names.count(name) > 1 and paths.count(path) == 1 else name
             for name, path in zip(names, paths, strict=True)]
    names = [re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80] or "dataset" for name in names]
    again = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}-{count + 1}" if count else name for name, count in zip(names, again, strict=True)]


def studies_of(runs: Sequence[Run], baseline: str | None = None, pair: Sequence[str] | None = None,
               alphas: Sequence[float] = ()) -> tuple[list[Study], list[str]]:
    """A study of each dataset, and sentences about datasets. See `study_of` for the arguments; raises UserError as it does.

    With several datasets, `baseline` and `pair` hold where the dataset has such runs. They must name runs of at least one.
    """
    datasets, notes = by_dataset(runs)
    if len(datasets) > 1:
        for option, asked in (("--baseline", [baseline] if baseline else []), ("--pair", pair or [])):
            if not any(_has(dataset.runs, asked) for dataset in datasets):
                labels = dict.fromkeys(run.label for dataset in datasets for run in dataset.runs)
                raise UserError(f"{option}: given {' '.join(asked)}, which no dataset has; allowed: "
                                + ", ".join(map(repr, list(labels)[:20])))
    found = []
    for name, of in datasets:
        own = baseline if len(datasets) == 1 or (baseline and _has(of, [baseline])) else None
        found.append(study_of(of, own, pair if len(datasets) == 1 or _has(of, pair or []) else None, alphas, name))
    return found, notes


def _has(runs: Sequence[Run], names: Sequence[str]) -> bool:
    return all(named(runs, name) for name in names)


def side_by_side(studies: Sequence[Study]) -> Section:
    """Accuracy of every run on every dataset: a row for each label, a column for each dataset."""
    labels = list(dict.fromkeys(run.label for study in studies for run in study.runs))
    rows: list[dict] = []
    for label in labels:
        row: dict = {"run": label}
        for study in studies:
            run = next((run for run in study.runs if run.label == label), None)
            row |= {} if run is None else accuracy(run.records).columns(study.dataset)
        rows.append(row)

    def column(name: str) -> Column:
        return Column(name, lambda row: percent(row[name], row[f"{name}_low"], row[f"{name}_high"]) if name in row else "")

    return Section("datasets", "All datasets", paragraphs(_TEXT),
                   [Table("datasets", "Accuracy on each dataset",
                          [Column("run", lambda row: row["run"], number=False), *(column(study.dataset) for study in studies)],
                          rows)])
