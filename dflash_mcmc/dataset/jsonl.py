"""`dataset=jsonl`: any JSON Lines file of questions and gold answers; the configuration names the fields."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dflash_mcmc.data.sources import FromFile
from dflash_mcmc.errors import UserError
from dflash_mcmc.fields import runtime
from dflash_mcmc.registry import register
from dflash_mcmc.types import Problem

_LEVEL = re.compile(r"(?:Level )?(\d{1,9})")
"""A level as MATH writes it (`Level 3`), or the number alone."""


@register("dataset", "jsonl")
@dataclass(slots=True, kw_only=True)
class JsonLines(FromFile):
    """Any JSON Lines file. Its content is part of the identity; the names of the fields are not."""

    path: str | None = runtime("JSON Lines file, plain or .gz; needed")
    question_field: str = runtime("field of the question, a text")
    answer_field: str = runtime("field of the gold answer, a text or a whole number")
    id_field: str | None = runtime("field of an id, a text or a whole number; null numbers the rows: 00000, 00001, ...")
    level_field: str | None = runtime("field of the level, a whole number, also as '3' or 'Level 3'; null = no level")
    subject_field: str | None = runtime("field of the subject, a text; null = no subject")
    solution_field: str | None = runtime("field of a worked solution, a text; null = no solution")

    def columns(self) -> tuple[str, ...]:
        """Fields that each row must have."""
        named = (self.question_field, self.answer_field, self.id_field, self.level_field, self.subject_field,
                 self.solution_field)
        return tuple(name for name in named if name is not None)

    def problem(self, row: dict, number: int) -> Problem:
        """The problem of a row. Raises UserError."""
        name = f"{number:05d}" if self.id_field is None else _written(row[self.id_field])
        level = None if self.level_field is None else _level(row[self.level_field], name)
        subject, solution = (None if field is None else row[field] for field in (self.subject_field, self.solution_field))
        return Problem(name, row[self.question_field], _written(row[self.answer_field]), level, subject, solution)


def _written(value: Any) -> Any:
    """The digits of a whole number. A decimal number stays a number and is refused later: its original digits are lost."""
    return str(value) if type(value) is int else value


def _level(value: object, problem: object) -> int | None:
    if value is None or type(value) is int:
        return value
    found = _LEVEL.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise UserError(f"dataset.level_field: problem {problem!r} has {value!r:.80} for its level; allowed: a whole number, "
                        "'3', 'Level 3' or null")
    return int(found[1])
