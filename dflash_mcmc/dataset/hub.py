"""`dataset=hub`: any dataset of the Hugging Face hub, or a local folder that `datasets` can load."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.dataset.inputs import loading
from dflash_mcmc.dataset.inputs.named import NamedFields
from dflash_mcmc.dataset.inputs.problems import checked
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import runtime
from dflash_mcmc.registry import register
from dflash_mcmc.types import Problem

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config


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

    def check(self, config: Config) -> None:
        """Checks that a dataset is named, in addition to the checks of every dataset. Raises ConfigError."""
        if self.path is None:
            raise ConfigError("dataset.path", None, "a name on the hub, such as openai/gsm8k, or a local folder of `datasets`")
        NamedFields.check(self, config)

    def rows(self) -> list[dict]:
        """The rows of the split. Raises UserError."""
        place = loading.Place(str(self.path), self.name, self.split, self.revision)
        return loading.rows_of(place, self.columns(), self.reads_whole_rows())

    def examples(self) -> list[Problem]:
        """The problems of the split of examples, of another file, or of the dataset itself. Raises UserError."""
        if self.fewshot_split is None or self.fewshot_path is not None:
            return NamedFields.examples(self)
        other = dataclasses.replace(self, split=self.fewshot_split)
        return checked([other.problem(row, number) for number, row in enumerate(other.rows())])
