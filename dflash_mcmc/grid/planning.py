"""Points of a grid, what each of them lacks, and how many jobs that takes. Loads no model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.config.identity import hash_of, identity_of, run_folder
from dflash_mcmc.config.jobs import Job
from dflash_mcmc.config.schema import Config
from dflash_mcmc.config.sweep import differing
from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.verdicts import NOT_DRAWN
from dflash_mcmc.store.records import SampleKey, record_files


class Planned(NamedTuple):
    """A point, and what it lacks."""

    config: Config
    overrides: list[str]
    choices: dict[str, str]
    label: str
    digest: str
    folder: Path
    asked: frozenset[SampleKey]
    num_pending: int

    @property
    def num_asked(self) -> int:
        return len(self.asked)


class Recorded(NamedTuple):
    """What a run's records say, without being kept."""

    verdicts: dict[SampleKey, str | None]
    """None of a probe's unit, which has no verdict."""
    share_seconds: float | None
    """Mean seconds that a process spent for a sample."""


def plan(jobs: Sequence[Job]) -> list[Planned]:
    """The points of a checked command, in their order; those that come to one run and ask for no more of it are one.

    Raises UserError.
    """
    labels = differing([job.overrides for job in jobs])
    planned: dict[Path, list[Planned]] = {}
    for job, label in zip(jobs, labels, strict=True):
        config = job.config
        digest = hash_of(identity_of(config))
        folder, keys = run_folder(config, digest).absolute(), asked(config)
        of_run = planned.setdefault(folder, [])
        if any(keys <= point.asked for point in of_run):
            continue
        of_run[:] = [point for point in of_run if not point.asked <= keys]
        of_run.append(Planned(config, list(job.overrides), dict(job.choices), label if len(jobs) > 1 and label else config.label(), digest,
                              folder, keys, pending(folder, keys)))
    return [point for of_run in planned.values() for point in of_run]


def asked(config: Config) -> frozenset[SampleKey]:
    """Every sample that a run asks for, or unit of a probe. Raises UserError."""
    if not config.probe.is_null:
        return frozenset((unit.problem, unit.chain) for unit in config.probe.units(config))
    return frozenset((problem.id, chain) for problem in config.dataset.problems() for chain in range(config.num_chains))


def pending(folder: Path, keys: Set[SampleKey]) -> int:
    """Samples that a run lacks; 1 where it lacks nothing but the summary of all. Raises UserError."""
    verdicts, path = recorded(folder).verdicts, folder / "summary.json"
    if missing := len(keys - verdicts.keys()):
        return missing
    try:
        summary = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # a machine that fails can leave it empty
        return 1
    return int(summary.get("num_samples", summary.get("num_units")) != len(verdicts))


def recorded(folder: Path) -> Recorded:
    """What is recorded in a run's folder, while others write to it. Raises UserError."""
    verdicts, shares = {}, []
    for path in record_files(folder).values():
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):  # it is being written, or what a killed process left
                    break
                try:
                    record = json.loads(line)
                    verdicts[record["problem"], record["chain"]] = record.get("verdict")
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f"{path}: line {number} is no record ({type(error).__name__})") from error
                shares.append(record.get("share_seconds"))
    shares = [seconds for seconds in shares if seconds is not None]
    return Recorded(verdicts, sum(shares) / len(shares) if shares else None)


def num_shards(num_pending: int, shards: int) -> int:
    """Jobs of a point: none has nothing to draw."""
    return min(num_pending, shards)


def failed(verdicts: dict[SampleKey, str | None]) -> int:
    """Samples that could not be drawn."""
    return Counter(verdicts.values())[NOT_DRAWN]
