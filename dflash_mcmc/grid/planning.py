"""The points of a grid, the samples that each of them lacks, and the number of jobs. Loads no model."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.config.identity import hash_of, identity_of, run_folder
from dflash_mcmc.config.schema import Config, Job
from dflash_mcmc.config.sweep import point_labels
from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.verdicts import NOT_DRAWN
from dflash_mcmc.runner import tasks_of
from dflash_mcmc.store.described import json_object
from dflash_mcmc.store.reading import each_of_file
from dflash_mcmc.store.records import SampleKey, key_of

_LATEST = 50
"""The samples of a process, the latest it recorded, that its rate is computed from."""
_LIVE_SECONDS = 3600.0
"""A process counts for the rate if its last record is at most this much older than the run's last one."""


class Planned(NamedTuple):
    """A point and the samples that it lacks."""

    job: Job
    label: str
    digest: str
    folder: Path
    asked: frozenset[SampleKey]
    num_pending: int

    @property
    def num_asked(self) -> int:
        return len(self.asked)


class Recorded(NamedTuple):
    """What a grid reads from the records of a run; the records themselves are not kept in memory."""

    verdicts: dict[SampleKey, str | None]
    """Verdict of each recorded sample; None for a unit of a probe."""
    share_seconds: float | None
    """Mean seconds that a process spent on a sample, over the latest samples of each process that is still recording."""


def plan(jobs: Sequence[Job]) -> list[Planned]:
    """The points of a checked command, in order. Points of the same run are merged if one requests all samples of the other.

    Raises UserError.
    """
    planned: dict[Path, list[Planned]] = {}
    for job, label in zip(jobs, point_labels(jobs), strict=True):
        config = job.config
        digest = hash_of(identity_of(config))
        folder, keys = run_folder(config, digest).absolute(), asked(config)
        of_run = planned.setdefault(folder, [])
        if any(keys <= point.asked for point in of_run):
            continue
        of_run[:] = [point for point in of_run if not point.asked <= keys]
        of_run.append(Planned(job, label, digest, folder, keys, pending(folder, keys)))
    return [point for of_run in planned.values() for point in of_run]


def asked(config: Config) -> frozenset[SampleKey]:
    """The keys of all tasks that a run requests. Raises UserError."""
    return frozenset(tasks_of(config).keys())


def pending(folder: Path, keys: Set[SampleKey]) -> int:
    """Number of samples that a run lacks; 1 if only the summary of all samples is missing. Raises UserError."""
    verdicts, path = recorded(folder).verdicts, folder / "summary.json"
    if missing := len(keys - verdicts.keys()):
        return missing
    try:
        summary = json_object(path)
    except UserError:  # a machine that fails can leave the file empty
        return 1
    return int(summary.get("num_samples", summary.get("num_units")) != len(verdicts))


def recorded(folder: Path) -> Recorded:
    """Reads the records in a run's folder, to which other processes may be writing. Raises UserError."""
    verdicts = dict[SampleKey, str | None]()
    latest: defaultdict[Path, deque[object]] = defaultdict(lambda: deque(maxlen=_LATEST))
    for path, record in each_of_file(folder):
        verdicts[key_of(record)] = record.get("verdict")
        latest[path].append(record.get("share_seconds"))
    return Recorded(verdicts, _seconds(latest))


def _seconds(latest: Mapping[Path, Iterable[object]]) -> float | None:
    """The mean over the files that have grown lately: jobs that ended long ago may have run on other machines."""
    written = {path: path.stat().st_mtime for path in latest}
    newest = max(written.values(), default=0.0)
    shares = [seconds for path, values in latest.items() if newest - written[path] <= _LIVE_SECONDS
              for seconds in values if isinstance(seconds, (int, float))]  # a unit of a probe may have another value
    return sum(shares) / len(shares) if shares else None


def num_shards(num_pending: int, shards: int) -> int:
    """Number of jobs of a point: at most one for each pending sample."""
    return min(num_pending, shards)


def failed(verdicts: dict[SampleKey, str | None]) -> int:
    """Number of samples that could not be drawn."""
    return Counter(verdicts.values())[NOT_DRAWN]
