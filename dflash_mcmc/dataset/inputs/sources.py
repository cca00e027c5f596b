"""Base classes of datasets that are read from rows: of a file, or of a published dataset on the hub."""

from __future__ import annotations

import dataclasses
import re
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from dflash_mcmc.dataset import Dataset
from dflash_mcmc.dataset.inputs import rows
from dflash_mcmc.dataset.inputs.problems import checked
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.fields import MISSING, identity, runtime
from dflash_mcmc.registry import name_of, options_with
from dflash_mcmc.types import Problem

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config


@dataclass(slots=True, kw_only=True)
class FromFile(Dataset):
    """Base class of datasets in a file of the user, with a problem in each row. A leaf needs `problem`."""

    path: str | None = runtime(MISSING, "JSON Lines file, plain or .gz")

    required: ClassVar[tuple[str, ...]] = ()
    """Fields that each row must have."""

    @abstractmethod
    def problem(self, row: dict, number: int) -> Problem:
        """The problem of a row; `number` counts from 0. Raises UserError."""

    def check(self, config: Config) -> None:
        """Checks that a file is given, in addition to the checks of every dataset. Raises ConfigError."""
        Dataset.check(self, config)
        if self.path is None:
            raise ConfigError("dataset.path", None, "a JSON Lines file")

    def columns(self) -> tuple[str, ...]:
        """Fields that each row must have."""
        return self.required

    def rows(self) -> list[dict]:
        """The rows of the file. Raises UserError."""
        return rows.of_file(self.path, self.columns())

    def examples(self) -> list[Problem]:
        """The problems of the file of examples, or of the dataset itself. Raises UserError."""
        if self.fewshot_path is None:
            return self.all_problems()
        rows_of = rows.of_file(self.fewshot_path, self.columns(), "dataset.fewshot_path")
        return checked([self.problem(row, number) for number, row in enumerate(rows_of)])

    def all_problems(self) -> list[Problem]:
        """The problem of each row. Raises UserError."""
        return checked([self.problem(row, number) for number, row in enumerate(self.rows())])


@dataclass(slots=True, kw_only=True)
class Benchmark(FromFile):
    """Base class of published datasets: a pinned commit of the hub, or a file, with a known number of rows."""

    revision: str | None = identity(MISSING, "commit on the hub, 40 hexadecimal digits; with a path it has no effect and is "
                                    "null in the record")
    check_rows: bool = runtime(True, "refuse a number of rows that differs from the benchmark's")

    hub: ClassVar[rows.Hub]
    """The published dataset, which is read where there is no path."""
    num_published: ClassVar[int]
    """Number of problems of the published dataset."""

    def num_known(self) -> int | None:
        """The published number; None if a file is read."""
        return self.num_published if self.path is None else None

    def check(self, config: Config) -> None:
        """Checks that a file or a commit is given, in addition to the checks of every dataset. Raises ConfigError."""
        Dataset.check(self, config)
        if self.path is None and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ConfigError("dataset.revision", self.revision, f"a commit of {self.hub.name} on the hub, all 40 hexadecimal "
                              "digits, so that a run can be repeated; or a file, dataset.path=/path/to/test.jsonl")

    def resolved(self, config: Config) -> Benchmark:
        """The dataset with its prompt as text. The revision is null if a file is read."""
        revision = None if self.path else self.revision
        return dataclasses.replace(cast(Benchmark, Dataset.resolved(self, config)), revision=revision)

    def canonical(self, config: Config) -> dict[str, object]:
        """The content is part of the identity, so the revision is not."""
        return {"revision": None}

    def rows(self) -> list[dict]:
        """The rows of the file, or of the hub. Raises UserError."""
        if self.path is None:
            return rows.of_hub(self.hub, self.revision, self.columns())
        return FromFile.rows(self)

    def all_problems(self) -> list[Problem]:
        """The problem of each row. Raises UserError, with `check_rows` also if their number is not the published one."""
        found = FromFile.all_problems(self)
        if self.check_rows and len(found) != self.num_published:
            raise UserError(f"dataset.path: {self.path or self.hub.name} has {len(found)} rows; allowed: the benchmark's "
                            f"{self.num_published}, or any number with dataset.check_rows=false")
        return found


def check_is_run(config: Config, dataset: str) -> None:
    """Checks that the grader runs programs, if the run is graded. Raises ConfigError."""
    from dflash_mcmc.config.schema import groups_of

    if "grader" in groups_of(config) and not config.grader.runs_answers:
        able = options_with("grader", "runs_answers")
        raise ConfigError("grader", name_of(config.grader), f"{able}, with dataset={dataset}, whose answers are programs")
