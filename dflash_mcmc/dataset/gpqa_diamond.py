"""GPQA-diamond: 198 multiple-choice questions of graduate level (Rein et al. 2023, arXiv 2311.12022)."""

from dataclasses import dataclass

from dflash_mcmc.components import register, runtime
from dflash_mcmc.dataset import is_text
from dflash_mcmc.dataset.inputs.sources import Benchmark, Hub
from dflash_mcmc.errors import UserError
from dflash_mcmc.rng import Key, Stream
from dflash_mcmc.types import Problem

_OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_LETTERS = "ABCD"


@register("dataset", "gpqa_diamond")
@dataclass(slots=True, kw_only=True)
class GpqaDiamond(Benchmark):
    """GPQA-diamond, from the hub (Idavidrein/gpqa, which asks for an account) or its CSV file; for grader=choice.

    The question ends with the four options in a fixed random order, as `A) ...`. The gold answer is the letter of the right
    option, for grader=choice with letters=ABCD.
    """

    path: str | None = runtime(None, "gpqa_diamond.csv, or a JSON Lines file with its columns; null takes the hub")
    options_seed: int = runtime(0, "seed of the order of the options; the order is part of the identity, with the questions")
    max_new_tokens: int = 4096
    prompt: str = "choice"
    revision: str | None = "633f5ee89ab8ad4522a9f850766b73f62147ffdd"

    hub = Hub("Idavidrein/gpqa", "gpqa_diamond", split="train")  # its only split
    num_published = 198
    required = ("Record ID", "Question", *_OPTIONS)

    def problem(self, row: dict, number: int) -> Problem:
        for name in self.required:
            if not is_text(row[name]):
                raise UserError(f"dataset.path: row {number} has {row[name]!r:.80} for its {name}; allowed: a text")
        order = Stream(Key(self.options_seed).fold_in("gpqa", row["Record ID"])).shuffle(list(_OPTIONS))
        options = "\n".join(f"{letter}) {row[name].strip()}" for letter, name in zip(_LETTERS, order, strict=True))
        gold = _LETTERS[order.index(_OPTIONS[0])]
        return Problem(row["Record ID"], f"{row['Question'].strip()}\n\n{options}", gold, subject=row.get("High-level domain"))
