"""Turns rows into problems. The user names the fields, or gives Jinja templates where one field is not enough."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any

from dflash_mcmc.dataset.inputs.conversations import last_question, messages_of, tools_of
from dflash_mcmc.dataset.inputs.sources import FromFile, MissingField
from dflash_mcmc.errors import ConfigError, UserError, reason_of
from dflash_mcmc.fields import runtime
from dflash_mcmc.types import Problem

if TYPE_CHECKING:
    from jinja2 import Template

    from dflash_mcmc.settings import Settings

_LEVEL = re.compile(r"(?:Level )?(\d{1,9})")
"""A level as MATH writes it (`Level 3`), or the number alone."""
_NAMES = ("question_field", "answer_field", "id_field", "level_field", "subject_field", "solution_field", "messages_field",
          "tools_field")
_ROW = "row"
"""Name of the whole row in a template, for columns whose names are no identifiers: `{{ row['Correct Answer'] }}`."""


@dataclass(slots=True, kw_only=True)
class NamedFields(FromFile):
    """Base class of datasets whose rows have fields of any name.

    The names are not part of the identity; the content is.
    """

    question_field: str = runtime("question", "field of the question, a text; not read with question_template or "
                                  "messages_field")
    question_template: str | None = runtime(None, "the question as a Jinja template over the row's fields, such as '{{ story "
                                            "}} {{ query }}', or row['a b'] where a name has spaces; null takes "
                                            "question_field")
    answer_field: str | None = runtime("answer", "field of the gold answer, a text or a number; null = no gold answer, "
                                       "for runs that grade nothing")
    answer_template: str | None = runtime(None, "the gold answer as a Jinja template; null takes answer_field")
    id_field: str | None = runtime(None, "field of an id, a text or a whole number; null numbers the rows: 00000, 00001, ...")
    level_field: str | None = runtime(None, "field of the level, a whole number, also as '3' or 'Level 3'; null = no level")
    subject_field: str | None = runtime(None, "field of the subject, a text; null = no subject")
    solution_field: str | None = runtime(None, "field of a worked solution, a text; null = no solution")
    messages_field: str | None = runtime(None, "field of a conversation, a list of role and content; the model answers its "
                                         "last turn of the user or a tool; null uses the question alone")
    tools_field: str | None = runtime(None, "field of the tools that the chat template shows, a list of JSON schemas or its "
                                      "JSON text; null = no tools")
    second_template: str | None = runtime(None, "what {second} of blend.prompt stands for, as a Jinja template over the row's "
                                          "fields, such as '{{ question }}' where question_template has a context too; null = "
                                          "nothing")

    def check(self, config: Settings) -> None:
        """Checks the templates, in addition to the checks of every dataset. Raises ConfigError."""
        FromFile.check(self, config)
        for field, source in self._templates().items():
            if source is not None:
                _template(field, source)

    def _templates(self) -> dict[str, str | None]:
        return {name: getattr(self, name) for name in ("question_template", "answer_template", "second_template")}

    def columns(self) -> tuple[str, ...]:
        """Fields that each row must have."""
        question = None if self.question_template or self.messages_field else self.question_field
        answer = None if self.answer_template else self.answer_field
        templated = itertools.chain.from_iterable(sorted(_undeclared(each) - {_ROW}) for each in self._templates().values())
        named = (question, answer, self.id_field, self.level_field, self.subject_field, self.solution_field,
                 self.messages_field, self.tools_field, *templated)
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def all_problems(self) -> list[Problem]:
        """The problem of each row. Raises UserError; for a field that the rows lack it says which option names it."""
        try:
            return FromFile.all_problems(self)
        except MissingField as error:
            named = [name for name in _NAMES if getattr(self, name) == error.field]
            raise UserError("; ".join([str(error), *(f"dataset.{name} names this field" for name in named)])) from error

    def reads_whole_rows(self) -> bool:
        """Whether a template reads `row`, which can give it any field."""
        return any(_ROW in _undeclared(source) for source in self._templates().values())

    def problem(self, row: dict, number: int) -> Problem:
        """The problem of a row; `number` counts from 0. Raises UserError."""
        name = f"{number:05d}" if self.id_field is None else _written(row[self.id_field])
        where = f"row {number}"
        level = None if self.level_field is None else _level(row[self.level_field], name)
        subject, solution = (None if field is None else row[field] for field in (self.subject_field, self.solution_field))
        messages = () if self.messages_field is None else messages_of(row[self.messages_field], where)
        tools = () if self.tools_field is None else tools_of(row[self.tools_field], where)
        second = None if self.second_template is None else _rendered("second_template", self.second_template, row, where)
        return Problem(name, self._question(row, where) if not messages else last_question(messages), self._answer(row, where),
                       level, subject, solution, messages, tools, second)

    def _question(self, row: dict, where: str) -> Any:
        if self.question_template is None:
            return row[self.question_field]
        return _rendered("question_template", self.question_template, row, where)

    def _answer(self, row: dict, where: str) -> Any:
        if self.answer_template is not None:
            return _rendered("answer_template", self.answer_template, row, where)
        return "" if self.answer_field is None else _written(row[self.answer_field], decimal=True)


@cache
def _template(field: str, source: str) -> Template:
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(source)
    except TemplateError as error:
        raise ConfigError(f"dataset.{field}", source, f"a Jinja template ({reason_of(error)})") from error


@cache
def _undeclared(source: str | None) -> set[str]:
    if source is None:
        return set()
    from jinja2 import Environment, meta

    return meta.find_undeclared_variables(Environment().parse(source))


def _rendered(field: str, source: str, row: dict, where: str) -> str:
    try:
        return _template(field, source).render({**row, _ROW: row})
    except Exception as error:  # a template can apply any operation to the values of a row
        reason = reason_of(error, 200)
        raise UserError(f"dataset.{field}: {where}: {type(error).__name__}: {reason}; the row has: "
                        f"{', '.join(map(str, row))}") from error


def _written(value: Any, decimal: bool = False) -> Any:
    """A whole number as text, and with `decimal` a finite number too; any other value unchanged."""
    if decimal and type(value) is float and abs(value) < float("inf"):
        return format(Decimal(repr(value)), "f")  # without an exponent, whose e may be read as Euler's number
    return str(value) if type(value) is int else value


def _level(value: object, problem: object) -> int | None:
    if value is None or type(value) is int:
        return value
    match = _LEVEL.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise UserError(f"dataset.level_field: problem {problem!r} has {value!r:.80} for its level; allowed: a whole number, "
                        "'3', 'Level 3' or null")
    return int(match[1])
