"""Lists of problems: their checks, the hash of their content, and what a run requests: by id, by shard and by number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dflash_mcmc.errors import ConfigError, UserError, did_you_mean
from dflash_mcmc.fields import runtime
from dflash_mcmc.types import Problem


def content_hash(problems: Iterable[Problem]) -> str:
    """Hash of ids, questions, answers, solutions, conversations and tools."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(repr((problem.id, problem.question, problem.answer, problem.solution)).encode())
        if problem.messages or problem.tools:
            digest.update(json.dumps([problem.messages, problem.tools], sort_keys=True).encode())
    return digest.hexdigest()[:32]


def checked(problems: list[Problem]) -> list[Problem]:
    """The problems, after a check that each has its own id and parts of the right type. Raises UserError."""
    seen: set[str] = set()
    for problem in problems:
        for name in ("id", "question", "answer", "solution", "subject"):
            value = problem._asdict()[name]
            if not _is_text(value) and (value is not None or name not in ("solution", "subject")):
                raise UserError(f"dataset.path: problem {problem.id!r} has {value!r:.80} for its {name}; allowed: a text")
        if problem.id in seen:
            raise UserError(f"dataset.path: the id {problem.id!r} occurs twice; allowed: a different id for each problem")
        seen.add(problem.id)
        if problem.level is not None and type(problem.level) is not int:
            raise UserError(f"dataset.path: problem {problem.id!r} has {problem.level!r:.80} for its level; allowed: a whole "
                            "number")
    return problems


def _is_text(value: object) -> bool:
    """Whether a tokenizer accepts a value: JSON can hold lone surrogates, and no tokenizer accepts them."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class ProblemSelection:
    """The problems that a run requests: the first `limit` of all problems, of those with some ids, or of some shards."""

    limit: int | None = runtime(None, "number of problems: the first of those that ids or shards select; null takes all", ge=1)
    ids: list[str] | None = runtime(None, "problems with these ids; null takes all")
    shards: list[int] | None = runtime(None, "numbers of the shards to take, from 0; shard i of num_shards is problems i, i + "
                                       "num_shards, i + 2 num_shards, ...; null takes all")
    num_shards: int | None = runtime(None, "number of shards that the dataset is divided into; null with shards=null", ge=1)

    def check_choice(self) -> None:
        """Checks ids and shards. Raises ConfigError."""
        for name, values in (("ids", self.ids), ("shards", self.shards)):
            if values == []:
                raise ConfigError(f"dataset.{name}", [], "at least one, or null")
        if self.ids is not None and self.shards is not None:
            raise ConfigError("dataset.ids", self.ids, "null with dataset.shards; only one of the two can select problems")
        if (self.shards is None) != (self.num_shards is None):
            missing, given = ("num_shards", "shards") if self.num_shards is None else ("shards", "num_shards")
            raise ConfigError(f"dataset.{missing}", None, f"not null with dataset.{given}; shards count from 0 on")
        count = self.num_shards or 0
        wrong = [shard for shard in self.shards or () if not 0 <= shard < count]
        if wrong:
            raise ConfigError("dataset.shards", wrong[0], f"0 to {count - 1} with dataset.num_shards={count}")

    def chosen(self, problems: Sequence[Problem]) -> list[Problem]:
        """The requested problems, in the dataset's order. Raises ConfigError for an id that no problem has."""
        if self.ids is None:
            return chosen(problems, self.limit, self.shards, self.num_shards)
        return with_ids(problems, self.ids)[:self.limit]


def with_ids(problems: Sequence[Problem], ids: Sequence[str]) -> list[Problem]:
    """The problems with these ids, in their order. Raises ConfigError for an id that no problem has."""
    known = [problem.id for problem in problems]
    unknown = next((name for name in ids if name not in known), None)
    if unknown is not None:
        raise ConfigError("dataset.ids", unknown, f"ids of the {len(known)} problems, such as {known[0]!r}"
                          + did_you_mean(unknown, known))
    asked = set(ids)
    return [problem for problem in problems if problem.id in asked]


def chosen(problems: Sequence[T], limit: int | None, shards: Sequence[int] | None, num_shards: int | None) -> list[T]:
    """The first `limit` problems of these shards, or of all problems without shards, in their order. Raises ConfigError.

    Shards are strided: shard i of n is problems i, i + n, i + 2n, ..., as in the code of the guided-power-sampling
    document (maxwell-gao/flashSpeculation, `range(shard, len(dataset), n_shards)`). Shards 0 to 7 of 40 of MATH-500 are the
    document's 104 problems.
    """
    if shards is None or num_shards is None:
        return list(problems[:limit])
    found = [problem for index, problem in enumerate(problems) if index % num_shards in shards][:limit]
    if not found:
        raise ConfigError("dataset.shards", list(shards), f"shards with a problem in them: there are {len(problems)} problems")
    return found
