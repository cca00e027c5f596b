"""`dataset=jsonl`: any JSON Lines file of questions and gold answers; the configuration names the fields."""

from dataclasses import dataclass

from dflash_mcmc.components import register, runtime
from dflash_mcmc.dataset.inputs.sources import NamedFields


@register("dataset", "jsonl")
@dataclass(slots=True, kw_only=True)
class JsonLines(NamedFields):
    """Any JSON Lines or CSV file. Its content is part of the identity; the names of the fields are not."""

    path: str | None = runtime(None, "JSON Lines file, plain or .gz, or a .csv file; needed")
