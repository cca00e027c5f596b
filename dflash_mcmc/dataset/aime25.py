"""AIME 2025: the 30 problems of the American Invitational Mathematics Examination I and II of that year."""

from dataclasses import dataclass

from dflash_mcmc.components import register, runtime
from dflash_mcmc.dataset.inputs.sources import Benchmark, Hub
from dflash_mcmc.types import Problem


@register("dataset", "aime25")
@dataclass(slots=True, kw_only=True)
class Aime25(Benchmark):
    """AIME I and II of 2025, from the hub (math-ai/aime25) or a JSON Lines file; without solutions."""

    path: str | None = runtime(None, "JSON Lines file with problem and answer, AIME I before AIME II; null takes the hub")
    max_new_tokens: int = 4096
    revision: str | None = "563bb8404243c5f09de6ec262f2db674fe5bce9b"

    hub = Hub("math-ai/aime25")
    num_published = 30
    required = ("problem", "answer")

    def problem(self, row: dict, number: int) -> Problem:
        """The problem of a row; rows have no id, so their order numbers them."""
        return Problem(f"aime25-{number:02d}", row["problem"], row["answer"])
