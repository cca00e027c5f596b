"""MATH-500: the 500 test problems of OpenAI's PRM800K split of MATH (Hendrycks et al. 2021, Lightman et al. 2023)."""

from dataclasses import dataclass

from dflash_mcmc.components import register, runtime
from dflash_mcmc.dataset.inputs.sources import Benchmark, Hub
from dflash_mcmc.types import Problem


@register("dataset", "math500")
@dataclass(slots=True, kw_only=True)
class Math500(Benchmark):
    """MATH-500 with its levels and subjects, from the hub (HuggingFaceH4/MATH-500) or a JSON Lines file."""

    path: str | None = runtime(None, "JSON Lines file with problem, answer, level, subject, unique_id, and solution if there "
                               "is one; null takes the hub")
    prompt: str = "document"
    revision: str | None = "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"

    hub = Hub("HuggingFaceH4/MATH-500")
    num_published = 500
    required = ("problem", "answer", "level", "subject", "unique_id")

    def problem(self, row: dict, number: int) -> Problem:
        return Problem(row["unique_id"], row["problem"], row["answer"], row["level"], row["subject"], row.get("solution"))
