"""Datasets: problems with stable ids and gold answers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from dflash_mcmc import hub
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.types import Problem


def load_rows(name: str, subset: str | None, path: str | None, revision: str | None, columns: tuple[str, ...]) -> list[dict]:
    """Rows of the test split: from a JSON Lines file, or from the hub by name. Raises UserError, of one line."""
    import datasets

    datasets.disable_progress_bars()
    if path is not None and not Path(path).expanduser().is_file():
        raise ConfigError("dataset.path", path, "a JSON Lines file that exists, or null for the hub")
    offline = path is None and not hub.reachable()
    try:
        if path is not None:
            rows = datasets.load_dataset("json", data_files=str(Path(path).expanduser()), split="train")
        else:
            rows = datasets.load_dataset(name, subset, revision=revision, split="test")
    except Exception as error:  # datasets raises many types; all mean that these rows cannot be had
        if offline:
            raise UserError(f"dataset: {name} is not in the cache, and the hub cannot be reached; allowed: a file, "
                            "dataset.path=/path/to/test.jsonl") from error
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"dataset.path: cannot load {path or name}: {type(error).__name__}: {reason}") from error
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise UserError(f"dataset.path: {path or name} lacks the field {missing[0]!r}; it has: {', '.join(rows.column_names)}")
    return list(rows)


def unique(problems: list[Problem]) -> list[Problem]:
    """The problems, if each has an id of its own and texts where texts belong. Raises UserError, of one line."""
    seen = set()
    for problem in problems:
        if problem.id in seen:
            raise UserError(f"dataset.path: the id {problem.id!r} stands twice; allowed: an id of its own for each problem")
        seen.add(problem.id)
        for name in ("id", "question", "answer"):
            if not isinstance(getattr(problem, name), str):
                raise UserError(f"dataset.path: problem {problem.id!r} has {getattr(problem, name)!r} for its {name}; "
                                "allowed: a text")
    return problems


def content_hash(problems: Iterable[Problem]) -> str:
    """Hash of ids, questions and answers."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(repr((problem.id, problem.question, problem.answer)).encode())
    return digest.hexdigest()[:32]


def check_prompt(prompt: str) -> None:
    """A prompt template must name the question. Raises ConfigError."""
    if "{question}" not in prompt:
        raise ConfigError("dataset.prompt", prompt, "a text with {question} in it; other braces stand for themselves")
