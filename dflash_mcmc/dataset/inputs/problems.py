"""Lists of problems: their checks and the hash of their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from dflash_mcmc.errors import UserError
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
