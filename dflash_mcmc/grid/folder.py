"""A grid's folder, `outputs/<experiment>/grids/<time>-<token>/`.

    grid.json       the command, its points, and every submission with the ids of its jobs
    code/           the code that the jobs run
    points/         the configuration of each point
    jobs/           the events of each job, one a line: started, died, requeued, ...
    logs/           the output of SLURM, submitit and the workers
"""

import dataclasses
import datetime
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from dflash_mcmc.config.schema import Slurm
from dflash_mcmc.errors import UserError
from dflash_mcmc.process.machine import node
from dflash_mcmc.store.files import Count, Schema, append_line, objects_of, open_to_extend, shown, to_line, write_atomically
from dflash_mcmc.store.folder import Locks
from dflash_mcmc.store.records import json_object

GRIDS = "grids"
_FILE = "grid.json"


@dataclass(slots=True, kw_only=True)
class Point:
    """One run of a grid."""

    label: str
    overrides: list[str]
    choices: dict[str, Any]
    """The chosen option of each group, or None."""
    digest: str
    """The hash of the run's identity."""
    folder: str
    """The run folder."""
    num_asked: int
    """Number of samples that the point requests."""


@dataclass(slots=True, kw_only=True)
class SlurmJob:
    """One job of SLURM: a shard of a point."""

    id: str
    """SLURM's id: `17`, or `17_3` in an array."""
    point: int
    shard: int
    shards: int

    @property
    def name(self) -> str:
        """Base name of the job's files."""
        return f"{self.point:04d}-{self.shard}"


@dataclass(slots=True, kw_only=True)
class Grid:
    """The content of `grid.json`."""

    folder: Path
    token: str
    name: str
    """Name of the experiment."""
    command: list[str]
    directory: str
    """Working folder of the submission."""
    created: str
    launcher: Slurm
    points: list[Point]
    jobs: list[SlurmJob] = field(default_factory=list)

    @classmethod
    def create(cls, outputs: Path, name: str, command: list[str], launcher: Slurm, points: list[Point]) -> "Grid":
        """Makes a folder with its `grid.json`. Raises UserError."""
        now, token = datetime.datetime.now(), secrets.token_hex(4)
        folder = outputs / name / GRIDS / f"{now:%Y%m%d-%H%M%S-%f}-{token}"
        try:
            for subfolder in ("points", "jobs", "logs"):
                (folder / subfolder).mkdir(parents=True)
        except OSError as error:
            raise UserError(f"paths.outputs: cannot make {folder}: {error.strerror}") from error
        grid = cls(folder=folder, token=token, name=name, command=command, directory=os.getcwd(),
                   created=now.astimezone().isoformat(timespec="seconds"), launcher=launcher, points=points)
        grid.save()
        return grid

    @classmethod
    def read(cls, folder: Path) -> "Grid":
        """The grid in a folder. Raises UserError if the folder is not a grid's."""
        from pydantic import TypeAdapter, ValidationError

        path = folder / _FILE
        fields = {**json_object(path), "folder": str(folder)}
        try:  # as JSON, since of Python values a strict check takes only objects of the class
            grid = TypeAdapter(cls).validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "the file"
            raise UserError(f"{path}: cannot be read as a grid: {field}: given {shown(first['input'])}; allowed: "
                            f"{first['msg']}") from error
        if not grid.points or any(not 0 <= job.point < len(grid.points) for job in grid.jobs):
            raise UserError(f"{path}: cannot be read as a grid: has no points, or jobs of other points")
        return grid

    def save(self) -> None:
        fields = dataclasses.asdict(self)
        del fields["folder"]
        write_atomically(self.folder / _FILE, json.dumps(fields, indent=1) + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A lock to hold while jobs of this grid are submitted. Raises UserError if another process submits jobs."""
        with closing(Locks(self.folder / "lock")) as locks:
            if not locks.take(0):
                raise UserError(f"{self.folder}: another process submits jobs of this grid; try again")
            yield

    def point_file(self, point: int) -> Path:
        """File with the configuration of a point."""
        return self.folder / "points" / f"{point:04d}.yaml"

    def log_file(self, job: SlurmJob) -> Path:
        """File with the output of a job's workers."""
        return self.folder / "logs" / f"{job.name}.log"

    def note(self, job: SlurmJob, event: str, reason: str = "", **more: int) -> None:
        """Adds an event of a job. Raises UserError if it cannot be written."""
        line = {"time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "job": job.id, "point": job.point,
                "shard": job.shard, "shards": job.shards, "node": node(), "event": event, "reason": reason, **more}
        path = self.folder / "jobs" / f"{job.name}.jsonl"
        with open_to_extend(path) as file:  # without a part of a line that a node that failed has left
            append_line(path, file, to_line(line))

    def events(self, job: SlurmJob) -> list[dict]:
        """The events of a job, in order, without a line that is still being written."""
        found = objects_of(self.folder / "jobs" / f"{job.name}.jsonl", _EVENTS, "remove that line to leave the event out")
        return [event for event in found if event["job"] == job.id]


class JobEvent(TypedDict):
    """A line of a job's events."""

    time: str
    job: str
    node: str
    event: str
    reason: str
    recorded: NotRequired[Count]
    """Bytes of the records of the run at that time."""


_EVENTS = Schema(JobEvent)


def find(names: Sequence[str], outputs: Path) -> list[Grid]:
    """The grids that the names refer to; the newest grid of all without names. Raises UserError.

    A name is a grid's folder, or an experiment, which refers to its newest grid. The folder of an experiment's grids and a
    folder of experiments refer to their newest grids as well.
    """
    if not names:
        return [Grid.read(_newest(outputs.glob(f"*/{GRIDS}/*/{_FILE}"), f"{outputs}/: no grid was submitted from here"))]
    return [Grid.read(_folder(name, outputs)) for name in names]


def _folder(name: str, outputs: Path) -> Path:
    path = Path(name)
    if (path / _FILE).is_file():
        return path.resolve()
    if path.name == name and list(outputs.glob(f"*/{GRIDS}/{name}/{_FILE}")):
        return _newest(outputs.glob(f"*/{GRIDS}/{name}/{_FILE}"), name)
    experiment = path if path.is_dir() else outputs / name
    patterns = (f"{GRIDS}/*/{_FILE}", f"*/{GRIDS}/*/{_FILE}", *([f"*/{_FILE}"] if experiment.name == GRIDS else []))
    return _newest((file for pattern in patterns for file in experiment.glob(pattern)),
                   f"{name}: no grid; allowed: the folder of a grid, or an experiment that has one below {outputs}/")


def _newest(files: Iterator[Path], otherwise: str) -> Path:
    """The folder of the newest grid. Raises UserError with `otherwise` if there is none. Folder names begin with the time."""
    folders = sorted((file.parent for file in files), key=lambda folder: folder.name)
    if not folders:
        raise UserError(otherwise)
    return folders[-1].resolve()
