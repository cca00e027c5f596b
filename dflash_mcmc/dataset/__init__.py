"""Datasets: problems with stable ids and gold answers. A leaf is a `Dataset`; most of them are read from rows."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dflash_mcmc.data import prompts, rows
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.types import Problem

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class ProblemSelection:
    """Which problems of a dataset are asked for: by id, or by shard, and of those the first `limit`."""

    limit: int | None = runtime("first so many problems, of those that ids or shards leave; null takes all", ge=1)
    ids: list[str] | None = runtime("problems with these ids; null takes all")  # noqa: RUF009
    shards: list[int] | None = runtime(  # noqa: RUF009
        "shards to take, from 0 on; shard i of num_shards is problems i, i + num_shards, i + 2 num_shards, ...; null takes "
        "all")
    num_shards: int | None = runtime("shards that the dataset is divided into; null with shards=null", ge=1)

    num_published = None
    """Problems of the published dataset; None for a file of the user's."""

    def check_choice(self) -> None:
        """Ids and shards are given rightly. Raises ConfigError."""
        for name in ("ids", "shards"):
            if getattr(self, name) == []:
                raise ConfigError(f"dataset.{name}", [], "at least one, or null")
        if self.ids is not None and self.shards is not None:
            raise ConfigError("dataset.ids", self.ids, "null with dataset.shards: one of the two says which problems")
        if (self.shards is None) != (self.num_shards is None):
            missing, given = ("num_shards", "shards") if self.num_shards is None else ("shards", "num_shards")
            raise ConfigError(f"dataset.{missing}", None, f"not null with dataset.{given}; shards count from 0 on")
        count = self.num_shards
        wrong = [shard for shard in self.shards or () if not 0 <= shard < count]
        if wrong:
            raise ConfigError("dataset.shards", wrong[0], f"0 to {count - 1} with dataset.num_shards={count}")

    def chosen(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems that are asked for, in the dataset's order. Raises ConfigError for an id that none has."""
        return chosen(problems, self.limit, self.ids, self.shards, self.num_shards)

    def num_chosen(self) -> int:
        """How many problems are asked for; reads no published dataset."""
        if self.ids is None and self.num_published and getattr(self, "path", None) is None:
            return len(chosen(range(self.num_published), self.limit, None, self.shards, self.num_shards))
        return len(self.problems())


def chosen(problems: Sequence[T], limit: int | None, ids: Sequence[str] | None, shards: Sequence[int] | None,
           num_shards: int | None) -> list[T]:
    """The first `limit` of the problems with these ids, or of these shards, in their order. Raises ConfigError.

    Shards are strided: shard i of n is problems i, i + n, i + 2n, ..., as in the code behind the guided-power-sampling
    document (maxwell-gao/flashSpeculation, `range(shard, len(dataset), n_shards)`), so that shards 0 to 7 of 40 of MATH-500
    are its 104 problems. With neither ids nor shards these are all problems.
    """
    if ids is not None:
        known = [problem.id for problem in problems]
        unknown = next((name for name in ids if name not in known), None)
        if unknown is not None:
            raise ConfigError("dataset.ids", unknown, f"ids of the {len(known)} problems, such as {known[0]!r}"
                              + did_you_mean(unknown, known))
        asked = set(ids)
        return [problem for problem in problems if problem.id in asked][:limit]
    if shards is None:
        return list(problems[:limit])
    found = [problem for index, problem in enumerate(problems) if index % num_shards in shards][:limit]
    if not found:
        raise ConfigError("dataset.shards", list(shards), f"shards with a problem in them: there are {len(problems)} problems")
    return found


def content_hash(problems: Iterable[Problem]) -> str:
    """Hash of ids, questions, answers and solutions."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(repr((problem.id, problem.question, problem.answer, problem.solution)).encode())
    return digest.hexdigest()[:32]


def checked(problems: list[Problem]) -> list[Problem]:
    """The problems, if each has an id of its own and its parts are of the right type. Raises UserError, of one line."""
    seen = set()
    for problem in problems:
        if problem.id in seen:
            raise UserError(f"dataset.path: the id {problem.id!r} stands twice; allowed: an id of its own for each problem")
        seen.add(problem.id)
        for name in ("id", "question", "answer", "solution", "subject"):
            value = getattr(problem, name)
            if not _is_text(value) and (value is not None or name not in ("solution", "subject")):
                raise UserError(f"dataset.path: problem {problem.id!r} has {value!r:.80} for its {name}; allowed: a text")
        if problem.level is not None and type(problem.level) is not int:
            raise UserError(f"dataset.path: problem {problem.id!r} has {problem.level!r:.80} for its level; allowed: a whole "
                            "number")
    return problems


def _is_text(value: object) -> bool:
    """A lone surrogate, which JSON can hold, is no text: no tokenizer takes it."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


@dataclass(slots=True, kw_only=True)
class Dataset(ProblemSelection, ABC):
    """What every dataset has: which problems, and how they are asked. A leaf gives `all_problems`."""

    max_new_tokens: int = identity("longest answer in tokens", ge=1)
    prompt: str = identity(f"what is asked: {', '.join(prompts.TEMPLATES)} (dflash_mcmc/data/prompts.py has the texts), or a text "
                           "in which {question} stands for the problem")

    @abstractmethod
    def all_problems(self) -> list[Problem]:
        """Every problem, whichever are asked for. Raises UserError where they cannot be had."""

    def check(self, config: Config) -> None:
        """Raises ConfigError."""
        self.check_choice()
        prompts.resolve(self.prompt)

    def resolved(self, config: Config) -> Dataset:
        """With the text of its prompt: a template by name and the same written out are one run, whose record has the text."""
        return dataclasses.replace(self, prompt=prompts.resolve(self.prompt))

    def problems(self) -> list[Problem]:
        """The problems that are asked for. Raises UserError where they cannot be had."""
        return self.chosen(self.all_problems())

    def fingerprint(self) -> str:
        """Hash of all problems, whichever are asked for."""
        return content_hash(self.all_problems())


@dataclass(slots=True, kw_only=True)
class FromFile(Dataset):
    """A dataset that is a file of the user's, a problem a row. A leaf gives `columns` and `problem`."""

    path: str | None = runtime("JSON Lines file, plain or .gz")

    columns = ()
    """Fields that each row must have."""

    @abstractmethod
    def problem(self, row: dict, number: int) -> Problem:
        """The problem of a row; `number` counts from 0. Raises UserError."""

    def check(self, config: Config) -> None:
        """Raises ConfigError."""
        Dataset.check(self, config)  # super() does not work here: a class with slots is made twice
        if self.path is None:
            raise ConfigError("dataset.path", None, "a JSON Lines file")

    def rows(self) -> list[dict]:
        """The rows as they stand in the file. Raises UserError."""
        return rows.of_file(self.path, self.columns)

    def all_problems(self) -> list[Problem]:
        """The problem of each row. Raises UserError."""
        return checked([self.problem(row, number) for number, row in enumerate(self.rows())])


@dataclass(slots=True, kw_only=True)
class Benchmark(FromFile):
    """A published dataset: a pinned commit of the hub or a file, of a known number of rows."""

    revision: str | None = identity("commit on the hub, 40 hexadecimal digits; without effect, and null in the record, "
                                    "where there is a path")
    check_rows: bool = runtime("refuse another number of rows than the benchmark has")

    hub = None
    """`rows.Hub` that it is read from where there is no path."""

    def check(self, config: Config) -> None:
        """Raises ConfigError."""
        Dataset.check(self, config)
        if self.path is None and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ConfigError("dataset.revision", self.revision, f"a commit of {self.hub.name} on the hub, all 40 hexadecimal "
                              "digits, so that a run can be repeated; or a file, dataset.path=/path/to/test.jsonl")

    def resolved(self, config: Config) -> Benchmark:
        """With the text of its prompt, and with a revision only where one is read."""
        return dataclasses.replace(self, prompt=prompts.resolve(self.prompt), revision=None if self.path else self.revision)

    def canonical(self, config: Config) -> dict[str, object]:
        """The content is part of the identity, so the revision need not be."""
        return {"revision": None}

    def rows(self) -> list[dict]:
        """The rows as they stand in the file, or on the hub. Raises UserError."""
        if self.path is None:
            return rows.of_hub(self.hub, self.revision, self.columns)
        return rows.of_file(self.path, self.columns)

    def all_problems(self) -> list[Problem]:
        """The problem of each row, as many as there are to be. Raises UserError."""
        found = FromFile.all_problems(self)
        if self.check_rows and len(found) != self.num_published:
            raise UserError(f"dataset.path: {self.path or self.hub.name} has {len(found)} rows; allowed: the benchmark's "
                            f"{self.num_published}, or any number with dataset.check_rows=false")
        return found
