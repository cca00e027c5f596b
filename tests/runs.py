"""Runs in this process."""

from __future__ import annotations

from dflash_mcmc.config.jobs import Job
from dflash_mcmc.config.schema import Config
from dflash_mcmc.run import loop


def execute(config: Config) -> loop.RunResult:
    """Runs a configuration that no command line has asked for."""
    return loop.execute(Job(config))
