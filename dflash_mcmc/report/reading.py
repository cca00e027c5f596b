"""Finds the run folders of a report, and reads their runs; describes missing and corrupt data.

Published numbers and their sources are data files of the package: accuracies, and rows beside those of probes.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import OmegaConf

from dflash_mcmc.components import default_of, registered, restored, spec_of
from dflash_mcmc.config.identity import configuration_of, labels_of
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.errors import UserError
from dflash_mcmc.statistics.estimates import IntervalEstimate, wilson
from dflash_mcmc.store import records as stored
from dflash_mcmc.store.records import RUN, ProblemText, Record, hash_of, read_problems, read_records

DATASET = "math500"
"""The dataset of all published rows."""


def published_settings() -> dict[str, dict[str, object]]:
    """The settings of each source, by the source's name. The settings have the keys of a run's identity."""
    return {source["name"]: dict(source["fields"]) for source in _content("power_sampling")["sources"].values()}


def sources() -> list[str]:
    """Full references and settings of the published accuracies."""
    rows, of = _content("power_sampling")["rows"], _content("power_sampling")["sources"]
    return [f"{of[name]['text']} ({of[name]['setting']})" for name in dict.fromkeys(row["source"] for row in rows)]


def published() -> dict[tuple[str, str], dict[str, IntervalEstimate]]:
    """The published accuracies by model and short name of the source, in the order of the file.

    Those of a model are by method (base, greedy, temp, ps, grpo, blend_greedy, blend_ps, draft_blend_ps, tempering, vote).
    They have Wilson's intervals if the counts are known.
    """
    content, models = _content("power_sampling"), dict[tuple[str, str], dict[str, IntervalEstimate]]()
    for row in content["rows"]:
        models.setdefault((row["model"], content["sources"][row["source"]]["name"]), {})[row["method"]] = (
            wilson(row["correct"], row["total"]) if "correct" in row else IntervalEstimate(float(row["accuracy"])))
    return models


@cache
def _content(name: str) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(PACKAGE / "assets" / "published" / f"{name}.yaml")))


RUN_COLUMN = "run"
"""The column that says where a row comes from."""


def source_of(probe: str) -> str | None:
    """The reference of a probe's published numbers; None if there are none."""
    return _content("probes").get(probe, {}).get("source")


def beside(probe: str, identities: Mapping[str, Mapping[str, object]], table: str, rows: Sequence[dict]) -> list[dict]:
    """The rows of a table, each followed by the published row of its kind.

    A published row is of the same kind as a row if both agree in the columns that the data file names. It is shown after the
    last such row of a run with the setting of the document, once. No number of a published row enters a statistic.

    Args:
        identities: the identities of the runs as in run.json, by the value of `RUN_COLUMN` in their rows.
        rows: rows with the column `RUN_COLUMN`.
    """
    shown, of = list(rows), _content("probes").get(probe, {"tables": {}})
    paper = of["tables"].get(table)
    if paper is None:
        return shown
    runs = {label for label, own in identities.items() if all(own.get(key) == of["where"][key] for key in of["where"])}
    for published in paper["rows"]:
        alike = [index for index, row in enumerate(shown)
                 if row.get(RUN_COLUMN) in runs and all(row.get(key) == published.get(key) for key in paper["by"])]
        if alike:
            shown.insert(alike[-1] + 1, {RUN_COLUMN: f"published, section {paper['section']}", **published})
    return shown


_ALLOWED = "a run folder, an experiment folder, or a glob, such as 'outputs/*/*-0123456789ab' for an identity"


class Found(NamedTuple):
    """A run folder."""

    folder: Path
    named: bool
    """Whether the argument names this folder itself, rather than a folder above it or a pattern."""


def run_folders(arguments: Sequence[str | Path]) -> list[Found]:
    """The run folders that the arguments name, without duplicates: run folders, experiment folders, and globs.

    They follow the order of the arguments; runs below one folder are ordered by start time. Raises a one-line UserError for an
    argument that matches no run.
    """
    if not arguments:
        raise UserError(f"runs: given nothing; allowed: {_ALLOWED}")
    runs: dict[Path, Found] = {}
    for argument in map(str, arguments):
        if Path(argument).is_dir():
            found, nothing = _below(Path(argument)), f"{Path(argument)}: no finished sample here, and no run folder below"
        elif glob.has_magic(argument):
            folders = [Path(match) for match in glob.glob(argument, recursive=True) if Path(match).is_dir()]
            found = [run._replace(named=False) for folder in folders for run in _below(folder)]
            nothing = f"{argument}: no run folder matches"
        else:
            raise UserError(f"runs: given {argument!r}, which is not a folder; allowed: {_ALLOWED}")
        if not found:
            raise UserError(nothing)
        for run in sorted(found, key=_start):
            runs.setdefault(run.folder.resolve(), run)
    return list(runs.values())


def _below(folder: Path) -> list[Found]:
    """The folder itself if it is a run folder, else all run folders below it."""
    def is_run(files: Sequence[str]) -> bool:
        return RUN in files or any(re.fullmatch(r"records(\.\d+)?\.jsonl", name) for name in files)

    if is_run(os.listdir(folder)):
        return [Found(folder, True)]
    runs = []
    for parent, folders, files in os.walk(folder):
        if is_run(files):
            runs.append(Found(Path(parent), False))
            folders.clear()  # do not descend into a run folder
    return runs


def _start(run: Found) -> tuple[str, str]:
    """Sort key: start time, then path. Unreadable files sort first; reading the run reports their errors."""
    try:
        return str(stored.described(run.folder / RUN).sessions[0].get("started", "")), str(run.folder)
    except UserError:
        return "", str(run.folder)


_MOST_TOLD = 20
"""Number of left out lines of a run that a report lists; it counts the others."""
_LONGEST_NAME = 120
"""Characters of a condition in a label; figures have room for no more."""
_NAMED_BY = ("blend", "draft", "sampler", "decoder")


@dataclass(frozen=True, eq=False)
class Run:
    """A run that has at least one record."""

    folder: Path
    experiment: str
    condition: str
    label: str
    """The condition, followed by settings that distinguish the run from the other runs of the report."""
    identity: dict[str, Any]
    """The settings that make up the identity, as in run.json."""
    config: dict[str, Any]
    """The content of config.yaml."""
    sessions: list[dict]
    """One entry per start of the run."""
    records: list[Record]
    expected: int | None
    """Number of records that the finished run has; None if unknown."""
    summarised: bool = False
    """Whether the last start reported that nothing is missing."""
    asked: Mapping[str, ProblemText] = field(default_factory=dict)
    """Question and prompt of each problem by its id, as `problems.jsonl` has them; empty without the file."""

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that identify the run."""
        return hash_of(self.identity)

    @cached_property
    def num_chains(self) -> int:
        """The largest number of chains recorded for a problem."""
        return max(record["chain"] for record in self.records) + 1

    @cached_property
    def problems(self) -> list[str]:
        """Problem ids, in order of first appearance."""
        return list(dict.fromkeys(record["problem"] for record in self.records))

    @cached_property
    def full(self) -> list[Record]:
        """The records of the problems that have all chains. A vote over fewer chains would not be comparable."""
        counts = Counter(record["problem"] for record in self.records)
        return [record for record in self.records if counts[record["problem"]] == self.num_chains]

    @cached_property
    def complete(self) -> bool:
        """Whether every sample that the last start asked for is recorded.

        The run folder has the number of problems and chains that were asked for, but not the ids of the problems. Samples of
        other problems, drawn by an earlier start, must not hide missing samples. Therefore only the problems with the most
        chains are counted.
        """
        if self.expected is None or len(self.records) < self.expected:
            return False
        chains = max(1, int(self.config.get("num_chains") or 1))
        counts = Counter(record["problem"] for record in self.records if record["chain"] < chains)
        asked = -(-self.expected // chains)
        return self.summarised or sum(sorted(counts.values(), reverse=True)[:asked]) >= self.expected

    def label_without(self, settings: Collection[str]) -> str:
        """The label without the settings of these names, such as `alpha`."""
        return " ".join(word for word in self.label.split(" ") if word.partition("=")[0] not in settings)

    @property
    def shown(self) -> str:
        """The label. For an incomplete run, the number of its recorded samples is appended."""
        if self.complete:
            return self.label
        of = f"{self.expected:,}" if self.expected else "an unknown number of"
        return f"{self.label} (not complete: {len(self.records):,} of {of} samples)"

    @property
    def power(self) -> float | None:
        """The alpha of a run whose law is p^alpha; None for other laws, potentials among them, and for unknown samplers.

        A sampler is unknown if it is older than this code's, or not installed here.
        """
        leaf, values = registered("sampler").get(self.component("sampler")), dict(self.config.get("sampler") or {})
        values.pop("name", None)
        if leaf is None or "potential" in self.identity:
            return None
        known = fields(leaf.cls)  # a field that is newer than the run has its default there
        values = {each.name: default_of(each) for each in known if spec_of(each).later} | values
        return restored(leaf.cls, values).power() if values.keys() == {each.name for each in known} else None

    def component(self, group: str) -> str:
        """Name of the component in the group; `none` if there is none."""
        return str(self.identity.get(group, "none"))


def read(found: Sequence[Found], lenient: bool = False) -> tuple[list[Run], list[str]]:
    """The runs, and a sentence for each run, file or line that was left out.

    A killed process can leave a torn last line. Its sample is missing, which is not an error. Raises a one-line UserError for
    any other line that is not a record, for a file that cannot be read, and for a run that an argument names but that has no
    samples.

    Args:
        lenient: leaves out files and lines that cannot be read, and lists them, instead of raising.
    """
    runs, left_out = [], []
    for entry in found:
        try:
            run, messages = _read(entry.folder, lenient)
        except UserError as error:
            if not lenient:
                raise
            left_out.append(f"left out: {error}")
            continue
        left_out += messages
        why = "" if run.records else "no finished sample here"
        if "probe" in run.identity:
            why = f"a probe run, probe={run.identity['probe']}; its tables and figures are in its folder"
        if not why:
            runs.append(run)
        elif entry.named and not lenient:
            raise UserError(f"{entry.folder}: {why}")
        else:
            left_out.append(f"left out: {entry.folder}: {why}")
    if not runs:
        raise UserError("; ".join(left_out) or "runs: given nothing; allowed: at least one run")
    conditions = list(dict.fromkeys((run.experiment, run.condition) for run in runs))
    keys = sorted({key for run in runs for key in run.identity})

    def place(run: Run) -> tuple:
        values = [run.identity.get(key) for key in keys]
        return conditions.index((run.experiment, run.condition)), [
            (0, value, "") if isinstance(value, (int, float)) else (1, 0.0, str(value)) for value in values]

    # A sweep may start in any order. Runs that the command line names keep the order in which it names them.
    return labelled(runs if any(entry.named for entry in found) else sorted(runs, key=place)), left_out


def _read(folder: Path, lenient: bool) -> tuple[Run, list[str]]:
    """The run, and a sentence for each of the first lines that were left out, and for the number of the others."""
    identity, sessions = stored.described(folder / RUN)
    config = configuration_of(folder)
    left_out: list[str] = []
    records = [] if "probe" in identity else read_records(folder, stored.sample_schema(), left_out if lenient else None)
    asked: dict[str, ProblemText] = {}
    try:
        asked = read_problems(folder)
    except UserError as error:
        if not lenient:
            raise
        left_out.append(str(error))
    # A start adds its engine statistics to run.json, and then writes the summary, when no sample is pending.
    last, given = sessions[-1] if sessions else {}, config.get("condition")
    # Without a condition the name is of the components, as `Config.label` joins them.
    condition = str(given["name"]) if isinstance(given, dict) and given.get("name") else "_".join(
        name for group in _NAMED_BY if (name := str(identity.get(group, "none"))) not in ("none", "plain"))
    done = "engine" in last and stored.object_if_readable(folder / "summary.json").get("num_samples") == len(records)
    problems = last.get("num_problems")
    expected = len(records) if done else problems * int(config.get("num_chains") or 1) if problems else None
    more = len(left_out) - _MOST_TOLD
    said = [*left_out[:_MOST_TOLD], *([f"{folder}: {more:,} more lines"] if more > 0 else [])]
    return Run(folder, str(config["name"]), condition, condition, identity, config, sessions, records, expected, done, asked
               ), [f"left out: {message}" for message in said]


def labelled(runs: Sequence[Run]) -> list[Run]:
    """The runs with unique labels, made of the condition, the settings that vary, and the experiment if there are several.

    Labels that are still equal get a number.
    """
    several = len({run.experiment for run in runs}) > 1
    names = [f"{run.experiment}: {run.condition}" if several else run.condition for run in runs]
    named = [name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..." for name in names]
    labels = labels_of(named, [run.identity for run in runs], [run.config for run in runs])
    again = [labels[:index].count(label) for index, label in enumerate(labels)]
    return [replace(run, label=f"{label} ({count + 1})" if count else label)
            for run, label, count in zip(runs, labels, again, strict=True)]
