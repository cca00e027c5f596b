"""Submits the points of a checked command line, or the missing samples of a grid, as jobs of SLURM.

It plans the points, counts the samples that each of them lacks, and loads no model.
"""

import contextlib
import io
import os
import shlex
import shutil
import sys
from collections import defaultdict, deque
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.config.command import Command
from dflash_mcmc.config.identity import identity_of, point_labels, run_folder
from dflash_mcmc.config.schema import MOST_JOBS, PACKAGE, Config, Job, Slurm
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.grid import cluster, snapshot
from dflash_mcmc.grid.folder import GRIDS, Grid, Point, SlurmJob
from dflash_mcmc.grid.supervise import GRACE_SHARE, Supervisor
from dflash_mcmc.runner.plan import table
from dflash_mcmc.runner.tasks import tasks_of
from dflash_mcmc.store.records import SampleKey, each_record, hash_of, key_of, object_if_readable

_LATEST = 50
"""The samples of a process, the latest it recorded, that its rate is computed from."""
_LIVE_SECONDS = 3600.0
"""A process counts for the rate if its last record is at most this much older than the run's last one."""


def submit(command: Command, launcher: Slurm) -> Grid | None:
    """Submits a grid and prints its folder. Returns None if nothing is pending. Leaves no files if it raises UserError."""
    for job in command.jobs:
        _refuse_grace(job.config, launcher)
    launcher = _with_groups([job.config for job in command.jobs], launcher)
    cluster.check(launcher.partition)
    _submitit()
    planned = plan(command.jobs)
    print(table(command))
    shards = _shards([each.num_pending for each in planned], launcher)
    if complete := [each for each in planned if not each.num_pending]:
        which = f"{len(complete)} of {len(planned)} points" if len(complete) < len(planned) else (
            "all points; nothing is submitted" if len(planned) > 1 else "the run; nothing is submitted")
        print(f"already complete, with {sum(len(each.asked) for each in complete):,} samples: {which}")
    if not shards:
        return None
    outputs, name = Path(planned[0].job.config.paths.outputs).absolute(), planned[0].job.config.name
    made = [parent for parent in (outputs / name / GRIDS, outputs / name, outputs) if not parent.exists()]
    grid = Grid.create(outputs, name, [*sys.orig_argv], launcher, [each.point for each in planned])
    try:
        snapshot.copy_code(grid.folder / "code")
        for index, each in enumerate(planned):
            snapshot.write_point(grid.point_file(index), each.job.config, grid.folder / "code")
        _submit(grid, launcher, shards)
    except BaseException:
        shutil.rmtree(grid.folder)
        for parent in made:
            if not any(parent.iterdir()):
                parent.rmdir()
        raise
    _say(grid, grid.jobs, sum(each.num_pending for each in planned))
    return grid


def resume(grid: Grid, launcher: Slurm) -> None:
    """Submits the points that lack samples and have no waiting or running job.

    The jobs use the code and the configurations of the grid. Raises UserError.
    """
    cluster.check(launcher.partition)
    _submitit()
    with grid.locked():
        grid.jobs = Grid.read(grid.folder).jobs  # another process may have resumed it meanwhile
        ids = cluster.live([job.id for job in grid.jobs])
        live, pending = {job.point for job in grid.jobs if job.id in ids}, []
        configs = [snapshot.read_point(grid.point_file(index)) for index in range(len(grid.points))]
        launcher = _with_groups(configs, launcher)
        for index, (point, config) in enumerate(zip(grid.points, configs, strict=True)):
            _refuse_grace(config, launcher)
            keys = asked(config)
            pending.append(0 if index in live else num_pending(Path(point.folder), keys))
        shards = _shards(pending, launcher)
        if not shards:
            under_way = f"; {len(live)} point{'s have' if len(live) > 1 else ' has'} jobs that wait or run" if live else ""
            print(f"{_short(grid.folder)}: nothing is missing{under_way}")
            return
        before = len(grid.jobs)
        _submit(grid, launcher, shards)
    _say(grid, grid.jobs[before:], sum(pending))


def _with_groups(configs: Sequence[Config], launcher: Slurm) -> Slurm:
    """The launcher with a process for each group of GPUs, of the largest group of the points. Raises ConfigError."""
    return launcher.with_groups(max((config.engine.num_devices() for config in configs), default=1))


def _refuse_grace(config: Config, launcher: Slurm) -> None:
    """Raises ConfigError if a worker would still be stopping at the end of its job."""
    seconds, longest = config.hardware.grace_seconds, GRACE_SHARE * launcher.grace_seconds
    if seconds > longest:
        raise ConfigError("hardware.grace_seconds", seconds, f"at most {longest:g} with hydra.launcher.grace_seconds="
                          f"{launcher.grace_seconds}, at the end of which SLURM kills the job")


def _submitit() -> None:
    try:
        import submitit  # noqa: F401
    except ImportError as error:
        raise UserError("hydra/launcher: slurm needs submitit; allowed: pip install -e '.[slurm]'") from error


def _shards(pending: Sequence[int], launcher: Slurm) -> list[SlurmJob]:
    """The jobs, without ids. Raises UserError for a number of jobs that needs confirm=true."""
    counts = [min(num_samples, launcher.shards) for num_samples in pending]
    if sum(counts) > MOST_JOBS and not launcher.confirm:
        raise UserError(f"hydra.launcher: given {sum(counts):,} jobs for {sum(map(bool, counts)):,} points; allowed: at most "
                        f"{MOST_JOBS:,}, or hydra.launcher.confirm=true")
    return [SlurmJob(id="", point=point, shard=shard, shards=count)
            for point, count in enumerate(counts) for shard in range(count)]


def _submit(grid: Grid, launcher: Slurm, jobs: list[SlurmJob]) -> None:
    """Submits the jobs as arrays and notes their ids. Raises UserError after it has cancelled the jobs that SLURM accepted."""
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    complaint = io.StringIO()  # submitit prints the errors of sbatch
    executor = submitit.SlurmExecutor(grid.folder / "logs", python=launcher.python)
    executor.update_parameters(**_parameters(grid, launcher))
    size, taken = cluster.largest_array(), []
    try:
        for first in range(0, len(jobs), size):
            batch = jobs[first : first + size]
            with contextlib.redirect_stderr(complaint):
                submitted = executor.submit_array(
                    [Supervisor(str(grid.folder), grid.token, job.point, job.shard, job.shards, launcher) for job in batch])
            for job, of_slurm in zip(batch, submitted, strict=True):
                job.id = of_slurm.job_id
                taken.append(job)
        grid.jobs += taken
        grid.save()
    except BaseException as error:
        cluster.cancel(job.id for job in taken)
        if not isinstance(error, (FailedJobError, FailedSubmissionError)):
            raise
        reason = cluster.one_line(complaint.getvalue() or str(error))
        raise UserError(f"hydra.launcher: given {launcher.asked()}; SLURM refuses these jobs: {reason}") from error


def _parameters(grid: Grid, launcher: Slurm) -> dict[str, object]:
    """The parameters of submitit."""
    # Python imports the snapshot first, independent of setup, checkout and environment.
    path = f"export PYTHONPATH={shlex.quote(str(grid.folder / 'code'))}${{PYTHONPATH:+:$PYTHONPATH}}"
    wanted = {
        "partition": launcher.partition, "account": launcher.account, "qos": launcher.qos,
        "mem": f"{round(launcher.memory_gb * 1000)}M" if launcher.memory_gb else None,
        "gpus_per_node": launcher.gpus or None,
    }
    return {
        **{name: value for name, value in wanted.items() if value is not None},
        "job_name": grid.name, "time": launcher.minutes, "nodes": 1, "ntasks_per_node": 1, "cpus_per_task": launcher.cpus,
        "array_parallelism": launcher.array_parallelism, "setup": [*launcher.setup, path, "export PYTHONSAFEPATH=1"],
        "srun_args": [f"--cpus-per-task={launcher.cpus}"],  # srun does not inherit this number from its job
        "additional_parameters": {"signal": f"USR1@{launcher.grace_seconds}", "requeue": True},
        "teardown": _again(launcher.max_requeues),
    }


def _again(max_requeues: int) -> list[str]:
    """Shell lines that requeue the job if the supervisor itself was killed: out of memory, or before it handled signals."""
    return ["ended=$?",
            f'if [ "$ended" -gt 128 ] && [ "$ended" -ne 143 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_requeues} ]; then',
            # SLURM_JOB_ID of an array's last task is the id of the whole array.
            '  scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"',
            "fi",
            'exit "$ended"']


def _say(grid: Grid, jobs: list[SlurmJob], pending: int) -> None:
    points = len({job.point for job in jobs})
    ids = jobs[0].id if len(jobs) == 1 else f"{jobs[0].id} to {jobs[-1].id}"
    print(f"{_short(grid.folder)}: {len(jobs):,} job{'s' * (len(jobs) > 1)} for {pending:,} samples of {points:,} "
          f"point{'s' * (points > 1)}: {ids}\npython -m {PACKAGE.name}.grid status {shlex.quote(_short(grid.folder))}")


def _short(folder: Path) -> str:
    """The path relative to the working folder, if it is below that."""
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


class Planned(NamedTuple):
    """A point and the samples that it lacks."""

    job: Job
    point: Point
    asked: frozenset[SampleKey]
    num_pending: int


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
        if any(keys <= other.asked for other in of_run):
            continue
        of_run[:] = [other for other in of_run if not other.asked <= keys]
        point = Point(label=label, overrides=list(job.overrides), choices=dict(job.choices), digest=digest, folder=str(folder),
                      num_asked=len(keys))
        of_run.append(Planned(job, point, keys, num_pending(folder, keys)))
    return [each for of_run in planned.values() for each in of_run]


def asked(config: Config) -> frozenset[SampleKey]:
    """The keys of all tasks that a run requests. Raises UserError."""
    return frozenset(tasks_of(config).keys())


def num_pending(folder: Path, keys: Set[SampleKey]) -> int:
    """Number of samples that a run lacks; 1 if only the summary of all samples is missing. Raises UserError."""
    verdicts, path = recorded(folder).verdicts, folder / "summary.json"
    if missing := len(keys - verdicts.keys()):
        return missing
    summary = object_if_readable(path)
    return int(summary.get("num_samples", summary.get("num_units")) != len(verdicts))


def recorded(folder: Path) -> Recorded:
    """Reads the records in a run's folder, to which other processes may be writing. Raises UserError."""
    verdicts = dict[SampleKey, str | None]()
    latest: defaultdict[Path, deque[object]] = defaultdict(lambda: deque(maxlen=_LATEST))
    for path, record in each_record(folder):
        verdicts[key_of(record)] = record.get("verdict")
        latest[path].append(record.get("share_seconds"))
    # The mean over the files that have grown lately
    written = {path: path.stat().st_mtime for path in latest}
    newest = max(written.values(), default=0.0)
    shares = [seconds for path, recorded in latest.items() if newest - written[path] <= _LIVE_SECONDS
              for seconds in recorded if isinstance(seconds, (int, float))]  # a unit of a probe may have another value
    return Recorded(verdicts, sum(shares) / len(shares) if shares else None)
