"""Gold answers of programs, for tests."""

import json

from dflash_mcmc.grading.code.programs import CodeTask


def gold_of(task: CodeTask) -> str:
    """The gold answer of a task with a prompt, whose test defines `check`."""
    return json.dumps({name: getattr(task, name) for name in ("prompt", "test", "entry_point")}, ensure_ascii=False)
