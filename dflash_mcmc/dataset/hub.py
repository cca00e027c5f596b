"""`dataset=hub`: any dataset of the Hugging Face hub, or a local folder that `datasets` can load."""

from dataclasses import dataclass, replace

from dflash_mcmc.components import Settings, register, runtime
from dflash_mcmc.dataset import checked
from dflash_mcmc.dataset.inputs.sources import Hub, NamedFields, rows_of
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.types import Problem


@register("dataset", "hub")
@dataclass(slots=True, kw_only=True)
class HubDataset(NamedFields):
    """Any dataset of the hub or a local folder of `datasets`. No code of a dataset is run.

    A folder has files that `datasets` reads (parquet, JSON Lines, CSV), or was written by its `save_to_disk`. The content is
    part of the identity; its place and the names of its fields are not. A grader receives the gold answer as a text:
    grader=code needs one of the JSON objects of `dflash_mcmc.grading.code.programs`, which answer_template can make.
    """

    path: str | None = runtime(None, "name on the hub, such as openai/gsm8k, or a local folder; needed")
    name: str | None = runtime(None, "configuration (subset) of the dataset; null takes its only one")
    split: str = runtime("test", "split to read, such as test")
    revision: str | None = runtime(None, "commit, tag or branch of a name on the hub; null takes the newest")
    fewshot_split: str | None = runtime(None, "split of the few-shot examples; null takes the split itself")

    def check(self, config: Settings) -> None:
        """Checks that a dataset is named, in addition to the checks of every dataset. Raises ConfigError."""
        if self.path is None:
            raise ConfigError("dataset.path", None, "a name on the hub, such as openai/gsm8k, or a local folder of `datasets`")
        if self.fewshot_split is not None and self.fewshot_path is not None:
            raise ConfigError("dataset.fewshot_split", self.fewshot_split, "null with dataset.fewshot_path")
        super().check(config)

    def rows(self) -> list[dict]:
        place = Hub(str(self.path), self.name, self.split, self.revision)
        return rows_of(place, self.columns(), self.reads_whole_rows())

    def examples(self) -> list[Problem]:
        if self.fewshot_split is None:
            return super().examples()
        other = replace(self, split=self.fewshot_split)
        return checked([other.problem(row, index) for index, row in enumerate(other.rows())])
