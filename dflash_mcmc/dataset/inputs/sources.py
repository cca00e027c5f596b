"""Base classes of datasets that are read from rows: of a file, or of a published dataset on the hub.

The user names the fields, or gives Jinja templates where one field is not enough. Every error of a row is one line that names
the file and the place.
"""

import csv
import gzip
import itertools
import re
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from dflash_mcmc.components import MISSING, Settings, identity, runtime
from dflash_mcmc.dataset import Dataset, checked
from dflash_mcmc.dataset.inputs.conversations import last_question, messages_of, tools_of
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean, reason_of
from dflash_mcmc.process import http
from dflash_mcmc.store.files import loaded
from dflash_mcmc.types import Problem

if TYPE_CHECKING:
    from jinja2 import Template

_SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of a folder that `save_to_disk` writes."""
_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".gz", ".bz2", ".xz", ".zst", ".zip",
             ".tar")
"""Suffixes of files with texts that `datasets` reads."""


class MissingField(UserError):
    """Rows lack a field.

    Args:
        where: the rows.
        field: the field that they lack.
        known: the fields that they have.
        given_by: the configuration's field that names the rows.
    """

    def __init__(self, where: str, field: str, known: Iterable[str], given_by: str = "dataset.path"):
        known = list(map(str, known))
        super().__init__(f"{given_by}: {where} lacks the field {field!r}{did_you_mean(field, known)}; it has: "
                         f"{', '.join(known)}")
        self.field = field


class Hub(NamedTuple):
    """A split of a dataset on the hub, or of a local folder that `datasets` can load."""

    path: str
    """A name on the hub or a local folder."""
    name: str | None = None
    """Its configuration (subset)."""
    split: str = "test"
    revision: str | None = None

    @property
    def source(self) -> str:
        """The name on the hub, or the local folder, as `datasets` takes it."""
        return self.path if self.folder is None else str(self.folder)

    @property
    def folder(self) -> Path | None:
        """The local folder; None for a name on the hub."""
        folder = Path(self.path).expanduser()
        return folder if folder.is_dir() else None


def of_file(path: str | None, columns: Iterable[str], field: str = "dataset.path") -> list[dict]:
    """Rows of a JSON Lines file (`.gz` if it is gzipped) or of a .csv file. Each row has these columns. Raises UserError.

    The file is not read with the `datasets` library, because that infers one type for a column: a gold answer that looks like
    a date would become another text.
    """
    file = Path(path).expanduser() if path is not None else None
    if file is None or not file.is_file():
        raise ConfigError(field, path, "a JSON Lines or CSV file that exists")
    limit = csv.field_size_limit(2**31 - 1)  # a limit of the whole process, for which 131,072 characters are too long
    try:
        rows = list((_table if file.suffix == ".csv" else _parsed)(file, tuple(columns), field))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        reason = f"{type(error).__name__}: {error}; allowed: JSON Lines or CSV in UTF-8"
        raise UserError(f"{field}: cannot read {path}: {reason}") from error
    finally:
        csv.field_size_limit(limit)
    if not rows:
        raise UserError(f"{field}: {path} has no rows")
    return rows


def _table(file: Path, columns: tuple[str, ...], field: str) -> Iterator[dict]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        if len(set(names := reader.fieldnames or ())) < len(names):
            raise UserError(f"{field}: {file}: two columns have one name; allowed: a name for each of {', '.join(names)}")
        _check_columns(dict.fromkeys(names), columns if names else (), f"{file}: line 1", field)
        for row in reader:
            if None in row or None in row.values():
                raise UserError(f"{field}: {file}: line {reader.line_num} has another number of values than the first line "
                                "has names; allowed: a text with a comma in quotation marks")
            yield row


def lines_of(file: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line of a text file that is not blank, without a byte-order mark.

    Only line feeds and carriage returns end a line: U+2028 in a JSON text does not. Raises OSError, EOFError, zlib.error and
    UnicodeDecodeError.
    """
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8-sig") as lines:
        yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _parsed(file: Path, columns: tuple[str, ...], field: str) -> Iterator[dict]:
    for line_number, line in lines_of(file):
        try:
            row = loaded(line)
        except ValueError as error:
            reason = reason_of(error, 120)
            raise UserError(f"{field}: cannot read {file}: line {line_number} is not JSON: {reason}") from error
        if not isinstance(row, dict):
            raise UserError(f"{field}: cannot read {file}: line {line_number} is no JSON object: {row!r:.60}")
        _check_columns(row, columns, f"{file}: line {line_number}", field)
        yield row


def _check_columns(row: dict, columns: Iterable[str], where: str, field: str = "dataset.path") -> None:
    for column in columns:
        if column not in row:
            raise MissingField(where, column, row, field)


def rows_of(place: Hub, columns: Sequence[str], whole: bool) -> list[dict]:
    """The rows of a split, with only these columns, or with all columns if `whole`. Raises UserError.

    Fields of nested values that are None are left out, because a table of `datasets` has every field in every row.
    """
    table = _loaded(place)
    if not len(table):
        raise UserError(f"dataset.path: the split {place.split!r} of {place.path} has no rows")
    for column in columns:
        if column not in table.column_names:
            raise MissingField(place.path, column, table.column_names)
    return [{name: _without_none(value) for name, value in row.items()}
            for row in (table if whole else table.select_columns(list(columns)))]


@cache
def _loaded(place: Hub) -> Any:
    if (folder := place.folder) is None:
        if place.path.startswith((".", "/", "~")) or place.path.count("/") > 1:
            raise ConfigError("dataset.path", place.path, "a folder that exists, or a name on the hub, such as openai/gsm8k")
    elif (folder / "config.json").is_file():
        raise ConfigError("dataset.path", place.path, f"a folder of data; this one has a config.json, as a checkpoint has: "
                          f"model={place.path}")
    elif not any(file.suffix in _SUFFIXES for file in folder.rglob("*")):
        raise ConfigError("dataset.path", place.path, f"a folder with files of data ({', '.join(_SUFFIXES)})")
    import datasets  # late: the import takes seconds

    datasets.disable_progress_bars()
    offline = place.folder is None and not http.reachable()
    try:
        if place.folder is not None and any((place.folder / file).is_file() for file in _SAVED):
            # The configured split of a saved table, or of a table for each split
            loaded = datasets.load_from_disk(str(place.folder))
            if place.name is not None:
                raise ConfigError("dataset.name", place.name, "null with a folder that save_to_disk has written")
            splits = loaded if isinstance(loaded, dict) else {str(loaded.split or place.split): loaded}
            if place.split not in splits:
                raise _unknown("split", place.split, list(splits))
            return splits[place.split]
        return datasets.load_dataset(place.source, place.name, split=place.split, revision=place.revision)
    except UserError:
        raise
    except Exception as error:  # datasets raises many types; all mean that these rows cannot be read
        if mistake := _mistake(place):
            raise mistake from error
        if offline:
            raise UserError(f"dataset.path: {place.path} is not in the cache, and the hub cannot be reached; allowed: a file "
                            "of its rows, dataset.path=/path/to/test.jsonl, or with dataset=hub a local folder") from error
        at = f"@{place.revision}" if place.revision else ""
        raise UserError(f"dataset.path: cannot load {place.path}{at}: {type(error).__name__}: {reason_of(error)}") from error


def _mistake(place: Hub) -> UserError | None:
    """The error for a configuration or a split that does not exist; None if both exist, or their names cannot be read."""
    import datasets

    def names(listed: Callable[..., list[str]], *arguments: str) -> list[str]:
        try:
            return listed(place.source, *arguments, revision=place.revision)
        except Exception:  # the first error says what is wrong with the dataset
            return []

    configs = names(datasets.get_dataset_config_names)
    if configs and place.name not in (configs if len(configs) > 1 else [*configs, None]):
        return _unknown("name", place.name, configs)
    splits = names(datasets.get_dataset_split_names, *([place.name] if place.name else []))
    return _unknown("split", place.split, splits) if splits and place.split not in splits else None


def _unknown(field: str, given: str | None, names: Sequence[str]) -> ConfigError:
    allowed = ", ".join(f"dataset.{field}={name}" for name in names)
    return ConfigError(f"dataset.{field}", given, allowed + did_you_mean(given or "", names))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


@dataclass(slots=True, kw_only=True)
class FromFile(Dataset):
    """Base class of datasets in a file of the user, with a problem in each row. A leaf needs `problem`."""

    path: str | None = runtime(MISSING, "JSON Lines file, plain or .gz, or a .csv file")

    required: ClassVar[tuple[str, ...]] = ()
    """Fields that each row must have."""

    @abstractmethod
    def problem(self, row: dict, number: int) -> Problem:
        """The problem of a row; `number` counts from 0. Raises UserError."""

    def check(self, config: Settings) -> None:
        """Checks that a file is given, in addition to the checks of every dataset. Raises ConfigError."""
        super().check(config)
        if self.path is None:
            raise ConfigError("dataset.path", None, "a JSON Lines or CSV file")

    def columns(self) -> tuple[str, ...]:
        """Fields that each row must have."""
        return self.required

    def rows(self) -> list[dict]:
        """The rows of the file. Raises UserError."""
        return of_file(self.path, self.columns())

    def examples(self) -> list[Problem]:
        if self.fewshot_path is None:
            return self.all_problems()
        rows_of = of_file(self.fewshot_path, self.columns(), "dataset.fewshot_path")
        return checked([self.problem(row, index) for index, row in enumerate(rows_of)])

    def all_problems(self) -> list[Problem]:
        return checked([self.problem(row, index) for index, row in enumerate(self.rows())])


@dataclass(slots=True, kw_only=True)
class Benchmark(FromFile):
    """Base class of published datasets: a pinned commit of the hub, or a file, with a known number of rows."""

    revision: str | None = identity(MISSING, "commit on the hub, 40 hexadecimal digits; with a path it has no effect and is "
                                    "null in the record")
    check_rows: bool = runtime(True, "refuse a number of rows that differs from the benchmark's")

    hub: ClassVar[Hub]
    """The published dataset, which is read where there is no path."""
    num_published: ClassVar[int]
    """Number of problems of the published dataset."""

    def num_known(self) -> int | None:
        """The published number; None if a file is read."""
        return self.num_published if self.path is None else None

    def check(self, config: Settings) -> None:
        """Checks that a file or a commit is given, in addition to the checks of every dataset. Raises ConfigError."""
        Dataset.check(self, config)  # not `FromFile.check`, which asks for a file
        if self.path is None and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ConfigError("dataset.revision", self.revision, f"a commit of {self.hub.path} on the hub, all 40 hexadecimal "
                              "digits, so that a run can be repeated; or a file, dataset.path=/path/to/test.jsonl")

    def resolved(self, config: Settings) -> "Benchmark":
        """The dataset with its prompt as text. The revision is null if a file is read."""
        revision = None if self.path else self.revision
        return replace(cast(Benchmark, super().resolved(config)), revision=revision)

    def canonical(self, config: Settings) -> dict[str, object]:
        """The content is part of the identity, so the revision is not."""
        return {"revision": None}

    def rows(self) -> list[dict]:
        """The rows of the file, or of the hub. Raises UserError."""
        if self.path is None:
            return rows_of(self.hub._replace(revision=self.revision), self.columns(), whole=True)
        return super().rows()

    def all_problems(self) -> list[Problem]:
        """The problem of each row. Raises UserError, with `check_rows` also if their number is not the published one."""
        problems = super().all_problems()
        if self.check_rows and len(problems) != self.num_published:
            raise UserError(f"dataset.path: {self.path or self.hub.path} has {len(problems)} rows; allowed: the benchmark's "
                            f"{self.num_published}, or any number with dataset.check_rows=false")
        return problems


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
        super().check(config)
        for field, source in self._templates().items():
            if source is not None:
                _template(field, source)

    def _templates(self) -> dict[str, str | None]:
        return {name: getattr(self, name) for name in ("question_template", "answer_template", "second_template")}

    def columns(self) -> tuple[str, ...]:
        question = None if self.question_template or self.messages_field else self.question_field
        answer = None if self.answer_template else self.answer_field
        templated = itertools.chain.from_iterable(sorted(_undeclared(each) - {_ROW}) for each in self._templates().values())
        named = (question, answer, self.id_field, self.level_field, self.subject_field, self.solution_field,
                 self.messages_field, self.tools_field, *templated)
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def all_problems(self) -> list[Problem]:
        """The problem of each row. Raises UserError; for a field that the rows lack it says which option names it."""
        try:
            return super().all_problems()
        except MissingField as error:
            named = [name for name in _NAMES if getattr(self, name) == error.field]
            raise UserError("; ".join([str(error), *(f"dataset.{name} names this field" for name in named)])) from error

    def reads_whole_rows(self) -> bool:
        """Whether a template reads `row`, which can give it any field."""
        return any(_ROW in _undeclared(source) for source in self._templates().values())

    def problem(self, row: dict, number: int) -> Problem:
        name = f"{number:05d}" if self.id_field is None else _written(row[self.id_field])
        where = f"row {number}"
        level = None if self.level_field is None else _level(row[self.level_field], name)
        subject, solution = (None if field is None else row[field] for field in (self.subject_field, self.solution_field))
        messages = () if self.messages_field is None else messages_of(row[self.messages_field], where)
        tools = () if self.tools_field is None else tools_of(row[self.tools_field], where)
        second = None if self.second_template is None else _rendered("second_template", self.second_template, row, where)
        if messages:
            question = last_question(messages)
        elif self.question_template is not None:
            question = _rendered("question_template", self.question_template, row, where)
        else:
            question = row[self.question_field]
        if self.answer_template is not None:
            answer = _rendered("answer_template", self.answer_template, row, where)
        else:
            answer = "" if self.answer_field is None else _written(row[self.answer_field], decimal=True)
        return Problem(name, question, answer, level, subject, solution, messages, tools, second)


@cache
def _template(field: str, source: str) -> "Template":
    from jinja2 import StrictUndefined, TemplateError, sandbox

    try:
        return sandbox.ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(source)
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
