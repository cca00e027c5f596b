"""CL-bench (Tencent Hunyuan): tasks that require learning from contexts of 20,000 to 160,000 characters.

Its licence allows evaluation only, so no row is part of this repository. A language model judges an answer by rubrics
(grader=judge). Without a judge, the dataset is for probes that teacher-force the target's own answers.
"""

import json
from dataclasses import dataclass, replace
from typing import Any, cast

from dflash_mcmc.components import Settings, groups_of, identity, name_of, options_with, register, runtime
from dflash_mcmc.dataset.inputs import conversations, sources
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.types import Problem


@register("dataset", "clbench")
@dataclass(slots=True, kw_only=True)
class ClBench(sources.FromFile):
    """CL-bench's tasks from a JSON Lines file: long contexts, for probes and for grader=judge.

    A problem is a conversation up to the user's last turn. The chat template renders its turns. The gold answer is empty
    without grader=judge, and there is no solution. The subject is the category of the context.
    """

    path: str | None = runtime(None, "JSON Lines file with messages and metadata.task_id; needed, since its place on the hub "
                               "is not known")

    rubrics: bool = identity(False, "whether the gold answer is the list of rubrics; set where the run is graded")
    max_new_tokens: int = 512
    prompt: str = "plain"

    required = ("messages", "metadata")

    def check(self, config: Settings) -> None:
        """Checks that the grader is a judge, if the run is graded. Raises ConfigError."""
        if "grader" in groups_of(config) and not config.grader.judges:
            able = options_with("grader", "judges")
            raise ConfigError("dataset", "clbench", "a dataset with gold answers, or a probe that grades nothing, with "
                              f"probe={name_of(config.probe)}: the rubrics of clbench need a judge model, grader={able}")
        super().check(config)

    def resolved(self, config: Settings) -> "ClBench":
        """The dataset with rubrics as gold answers if the run is graded."""
        return replace(cast(ClBench, super().resolved(config)), rubrics="grader" in groups_of(config))

    def problem(self, row: dict, number: int) -> Problem:
        metadata: dict[str, Any] = row["metadata"] if isinstance(row["metadata"], dict) else {}
        messages = conversations.messages_of(row["messages"], f"row {number}")
        task: Any = metadata.get("task_id")  # an id that is no text is refused when the problems are checked
        gold = ""
        if self.rubrics:
            rubrics = row.get("rubrics")
            if not isinstance(rubrics, list) or not rubrics or not all(isinstance(rubric, str) for rubric in rubrics):
                raise UserError(f"dataset.path: row {number} has {rubrics!r:.80} for its rubrics; allowed: a list of texts")
            gold = json.dumps(rubrics, ensure_ascii=False)
        return Problem(task, conversations.last_question(messages), gold, subject=metadata.get("context_category"),
                       messages=messages)
