"""FOR THE MERGE: take the other branch's `run/loop.py`. An adapter of today's two drivers to `execute(job)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from dflash_mcmc.config.jobs import Job
from dflash_mcmc.registry import name_of


class RunResult(NamedTuple):
    """A run, as far as this start has brought it."""

    folder: Path
    summary: dict
    num_new: int
    num_beyond: int
    num_left: int = 0
    unit: str = "sample"
    table: Callable[[list[Path]], str] = str


def execute(job: Job) -> RunResult:
    """Runs a job with today's drivers. Raises UserError and Stopped."""
    named = OmegaConf.create({"hydra": OmegaConf.structured(HydraConf)})
    named.hydra.overrides.task = list(job.overrides)
    named.hydra.runtime.choices = dict(job.choices)
    HydraConfig.instance().set_config(named)
    if name_of(job.config.probe) != "none":
        from dflash_mcmc.report.probed import overall
        from dflash_mcmc.run.probing import execute as run

        unit = job.config.probe.unit
    else:
        from dflash_mcmc.report.table import overall
        from dflash_mcmc.run.samples import execute as run

        unit = "sample"
    return RunResult(*run(job.config), unit=unit, table=overall)
