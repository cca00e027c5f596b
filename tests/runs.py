"""Executes runs in the test's own process."""

from __future__ import annotations

from dflash_mcmc.config.schema import Config, Job
from dflash_mcmc.runner import loop


def execute(config: Config) -> loop.RunResult:
    """Executes a configuration that does not come from a command line."""
    return loop.execute(Job(config))
