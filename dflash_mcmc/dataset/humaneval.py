"""HumanEval: 164 Python functions to complete, each with its tests (Chen et al. 2021, arXiv 2107.03374)."""

import json
from dataclasses import dataclass

from dflash_mcmc.components import register, runtime
from dflash_mcmc.dataset.inputs.sources import Benchmark, Hub
from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.extraction import examples_in
from dflash_mcmc.types import Problem


@register("dataset", "humaneval")
@dataclass(slots=True, kw_only=True)
class HumanEval(Benchmark):
    """HumanEval, from the hub (openai/openai_humaneval) or a JSON Lines file; for grader=code.

    The question is the beginning of a file: imports, signature, docstring. A chat model writes the whole file in a code
    block (prompt=code); a base model continues it (prompt=plain with model.chat=false). The gold answer is JSON with the
    parts for running a completion: `prompt`, `test` and `entry_point`. The solution is the published body.
    """

    path: str | None = runtime(None, "JSON Lines file with task_id, prompt, entry_point, canonical_solution and test; null "
                               "takes the hub")
    max_new_tokens: int = 768
    prompt: str = "code"
    revision: str | None = "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544"

    hub = Hub("openai/openai_humaneval")
    num_published = 164
    answers_in_text = False
    required = ("task_id", "prompt", "entry_point", "canonical_solution", "test")

    def problem(self, row: dict, number: int) -> Problem:
        needed = {name: row[name] for name in ("prompt", "test", "entry_point")}
        for name, text in needed.items():
            if not isinstance(text, str):
                raise UserError(f"dataset.path: row {number} has {text!r:.80} for its {name}; allowed: a text")
        shown = examples_in(row["prompt"], row["entry_point"])
        return Problem(row["task_id"], row["prompt"], json.dumps(needed), solution=row["canonical_solution"], examples=shown)
