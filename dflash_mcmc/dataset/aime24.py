"""AIME 2024: the 30 problems of the American Invitational Mathematics Examination I and II of that year."""

from dataclasses import dataclass

from dflash_mcmc.components import register, runtime
from dflash_mcmc.dataset.inputs.sources import Benchmark, Hub
from dflash_mcmc.types import Problem


@register("dataset", "aime24")
@dataclass(slots=True, kw_only=True)
class Aime24(Benchmark):
    """AIME I and II of 2024, from the hub (HuggingFaceH4/aime_2024) or a JSON Lines file.

    Gold answers keep the leading zeros that the examination requires.
    """

    path: str | None = runtime(None, "JSON Lines file with id, problem, answer, and solution if there is one; null takes the "
                               "hub")
    max_new_tokens: int = 4096
    revision: str | None = "2fe88a2f1091d5048c0f36abc874fb997b3dd99a"

    hub = Hub("HuggingFaceH4/aime_2024", split="train")  # its only split
    num_published = 30
    required = ("id", "problem", "answer")

    def problem(self, row: dict, number: int) -> Problem:
        return Problem(f"aime24-{row['id']}", row["problem"], row["answer"], solution=row.get("solution"))
