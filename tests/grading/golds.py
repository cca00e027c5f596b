"""Gold answers of programs, and grades of texts, for tests."""

import json
from collections.abc import Iterable
from typing import Any

from dflash_mcmc.grading.code.programs import CodeTask
from dflash_mcmc.types import Grade


def gold_of(task: CodeTask) -> str:
    """The gold answer of a task with a prompt, whose test defines `check`."""
    return json.dumps({name: getattr(task, name) for name in ("prompt", "test", "entry_point")}, ensure_ascii=False)


def graded(pool: Any, pairs: Iterable[tuple[str, str]]) -> list[Grade]:
    """The grades of texts, each with a gold answer, in their order. The pool stays open."""
    for tag, (text, gold) in enumerate(pairs):
        pool.submit(tag, text, gold)
    found = dict(pool.finished(wait=True))
    return [found[tag] for tag in range(len(found))]
