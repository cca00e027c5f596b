"""A check that datasets of programs share. Their gold answers are tests, which only some graders can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.registry import name_of, options_with

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config


def check_is_run(config: Config, dataset: str) -> None:
    """Checks that the grader runs programs, if the run is graded. Raises ConfigError."""
    from dflash_mcmc.config.schema import groups_of

    if "grader" in groups_of(config) and not config.grader.runs_answers:
        able = options_with("grader", "runs_answers")
        raise ConfigError("grader", name_of(config.grader), f"{able}, with dataset={dataset}, whose answers are programs")
