"""GSM8K: 1,319 grade-school word problems (Cobbe et al. 2021)."""

from dataclasses import dataclass

from dflash_mcmc.components import register, runtime
from dflash_mcmc.dataset.inputs.sources import Benchmark, Hub
from dflash_mcmc.errors import UserError
from dflash_mcmc.types import Problem

_MARK = "#### "


@register("dataset", "gsm8k")
@dataclass(slots=True, kw_only=True)
class Gsm8k(Benchmark):
    """GSM8K's test split, from the hub (openai/gsm8k) or a JSON Lines file."""

    path: str | None = runtime(None, "JSON Lines file with question and answer; null takes the hub")
    max_new_tokens: int = 512
    prompt: str = "document"
    revision: str | None = "740312add88f781978c0658806c59bc2815b9866"

    hub = Hub("openai/gsm8k", "main")
    num_published = 1319
    required = ("question", "answer")

    def problem(self, row: dict, number: int) -> Problem:
        """The problem of a row; its gold answer follows `#### `. Raises UserError if a row has none."""
        if not isinstance(row["answer"], str) or _MARK not in row["answer"]:
            raise UserError(f"dataset.path: row {number} has no final answer after {_MARK!r}")
        return Problem(f"gsm8k-{number:04d}", row["question"], row["answer"].rpartition(_MARK)[2].strip().replace(",", ""),
                       solution=row["answer"])
