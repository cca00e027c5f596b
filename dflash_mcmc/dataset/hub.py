"""`dataset=hub`: any dataset of the Hugging Face hub, or a local folder that `datasets` can load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dflash_mcmc.dataset import checked
from dflash_mcmc.dataset.inputs.sources import MissingField, NamedFields
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean, reason_of
from dflash_mcmc.fields import runtime
from dflash_mcmc.process import http
from dflash_mcmc.registry import register
from dflash_mcmc.settings import Settings
from dflash_mcmc.types import Problem

_SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of a folder that `save_to_disk` writes."""
_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".gz", ".bz2", ".xz", ".zst", ".zip",
             ".tar")
"""Suffixes of files with texts that `datasets` reads."""


class Place(NamedTuple):
    """Where rows are."""

    path: str
    """A name on the hub or a local folder."""
    name: str | None
    split: str
    revision: str | None

    @property
    def source(self) -> str:
        """The name on the hub, or the local folder, as `datasets` takes it."""
        return self.path if self.folder is None else str(self.folder)

    @property
    def folder(self) -> Path | None:
        """The local folder; None for a name on the hub."""
        folder = Path(self.path).expanduser()
        return folder if folder.is_dir() else None


def rows_of(place: Place, columns: Sequence[str], whole: bool) -> list[dict]:
    """The rows of a split, with only these columns, or with all columns if `whole`. Raises UserError.

    Fields of nested values that are None are left out, because a table of `datasets` has every field in every row.
    """
    table = _loaded(place)
    names = table.column_names
    for column in columns:
        if column not in names:
            raise MissingField(place.path, column, names)
    if not len(table):
        raise UserError(f"dataset.path: the split {place.split!r} of {place.path} has no rows")
    return [{name: _without_none(value) for name, value in row.items()}
            for row in (table if whole else table.select_columns(list(columns)))]


@cache
def _loaded(place: Place) -> Any:
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
            raise UserError(f"dataset.path: {place.path} is not in the cache, and the hub cannot be reached; allowed: a local "
                            "folder of the dataset, or dataset=jsonl with a file") from error
        raise UserError(f"dataset.path: cannot load {place.path}: {type(error).__name__}: {reason_of(error)}") from error


def _mistake(place: Place) -> UserError | None:
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


@register("dataset", "hub")
@dataclass(slots=True, kw_only=True)
class HubDataset(NamedFields):
    """Any dataset of the hub or a local folder of `datasets`. No code of a dataset is run.

    A folder has files that `datasets` reads (parquet, JSON Lines, CSV), or was written by its `save_to_disk`. The content is
    part of the identity; its place and the names of its fields are not. A grader receives the gold answer as a text:
    grader=code needs one of the JSON objects of `dflash_mcmc.grading.code.programs`, which answer_template can make.
    """

    path: str | None = runtime(None, "name on the hub, such as openai/gsm8k, or a local folder; needed")
    name: str | None = runtime(None, "configuration (subset) of the dataset; null takes its only one")
    split: str = runtime("test", "split to read, such as test")
    revision: str | None = runtime(None, "commit, tag or branch of a name on the hub; null takes the newest")
    fewshot_split: str | None = runtime(None, "split of the few-shot examples; null takes the split itself")

    def check(self, config: Settings) -> None:
        """Checks that a dataset is named, in addition to the checks of every dataset. Raises ConfigError."""
        if self.path is None:
            raise ConfigError("dataset.path", None, "a name on the hub, such as openai/gsm8k, or a local folder of `datasets`")
        if self.fewshot_split is not None and self.fewshot_path is not None:
            raise ConfigError("dataset.fewshot_split", self.fewshot_split, "null with dataset.fewshot_path")
        super().check(config)

    def rows(self) -> list[dict]:
        place = Place(str(self.path), self.name, self.split, self.revision)
        return rows_of(place, self.columns(), self.reads_whole_rows())

    def examples(self) -> list[Problem]:
        if self.fewshot_split is None:
            return super().examples()
        other = dataclasses.replace(self, split=self.fewshot_split)
        return checked([other.problem(row, index) for index, row in enumerate(other.rows())])
