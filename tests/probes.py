"""Helpers for tests of probes: configurations with changed values, and records with and without a run."""

from dataclasses import replace
from pathlib import Path

from dflash_mcmc.config.schema import Config
from dflash_mcmc.draft.none import NoDraft
from dflash_mcmc.probe import Work
from dflash_mcmc.store.records import read_records


def records(folder: Path) -> list[dict]:
    """The records of a run, in the order of its file."""
    return read_records(folder)


def changed(config: Config, limit: int | None = None, drafting: bool = True, **changes) -> Config:
    """The configuration with `changes` of the probe, at most `limit` problems, and no draft unless `drafting`."""
    dataset = config.dataset if limit is None else replace(config.dataset, limit=limit)
    draft = config.draft if drafting else NoDraft()
    return replace(config, probe=replace(config.probe, **changes), dataset=dataset, draft=draft)


def measured(config: Config) -> list[dict]:
    """The records of all units, measured without a run folder."""
    work = Work(config.probe.units(config), "cpu")
    return [{**unit._asdict(), **record} for unit, record in config.probe.measure(config, work)]
