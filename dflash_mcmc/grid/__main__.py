"""`python -m dflash_mcmc.grid submit|status|cancel|resume`: grids of runs on SLURM."""

import argparse
import dataclasses
import datetime
import time
import typing
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from dflash_mcmc.components import spec_of
from dflash_mcmc.config import command
from dflash_mcmc.config.schema import Slurm, changed_launcher, expand
from dflash_mcmc.errors import UserError, one_line
from dflash_mcmc.grading.verdicts import NOT_DRAWN
from dflash_mcmc.grid import cluster, snapshot, submission
from dflash_mcmc.grid.folder import Grid, SlurmJob, find
from dflash_mcmc.process import program


class State(NamedTuple):
    """The state of a job."""

    word: str
    """`running`, `pending`, `completed`, `failed`, ..."""
    live: bool
    node: str = ""
    code: str = ""


class PointProgress(NamedTuple):
    """The numbers of samples of a point that are done, pending and failed, and the mean seconds of a sample."""

    done: int
    pending: int
    failed: int
    share_seconds: float | None
    remark: str = ""
    """Why the numbers cover all recorded samples instead of those that the point requests."""


def states(grid: Grid) -> dict[str, State]:
    """State of each job, by id. On a machine without SLURM it is the last event that each job has noted."""
    ids = [job.id for job in grid.jobs]
    queue, over = (cluster.live(ids), cluster.ended(ids)) if cluster.is_here() else ({}, {})
    by_id = {}
    for job in grid.jobs:
        if job.id in queue:
            by_id[job.id] = State(queue[job.id].lower(), True)
        elif job.id in over and over[job.id][0].split()[0] not in ("RUNNING", "PENDING", "REQUEUED"):
            word, _, code = over[job.id][0].partition(" ")
            by_id[job.id] = State(word.lower(), False, over[job.id][1], code)
        else:
            last = [{"event": "unknown", "node": ""}, *grid.events(job)][-1]
            word = {"complete": "completed", "started": "ended", "died": "ended"}.get(last["event"], last["event"])
            known = cluster.is_here() or word not in ("ended", "requeued")
            by_id[job.id] = State(word if known else "unknown", False, last["node"])
    return by_id


def progress(grid: Grid, number: int) -> PointProgress:
    """The progress of a point, read from its run folder alone. Raises UserError."""
    point, (verdicts, share_seconds), remark = grid.points[number], submission.recorded(Path(grid.points[number].folder)), ""
    try:
        keys = submission.asked(snapshot.read_point(grid.point_file(number)))
        verdicts, asked = {key: verdict for key, verdict in verdicts.items() if key in keys}, len(keys)
    except UserError as error:  # what the point reads is gone; the records are not
        asked, remark = point.num_asked, f"{point.label}: {error}; all recorded samples are counted"
    failed = Counter(verdicts.values())[NOT_DRAWN]
    return PointProgress(len(verdicts), max(0, asked - len(verdicts)), failed, share_seconds, remark)


def table(grid: Grid) -> str:
    """A table of the points, and a line for each job that ended and whose samples no other job draws. Raises UserError."""
    jobs, rows, missed, pending, lines = states(grid), [], 0, 0, []
    for index, point in enumerate(grid.points):
        of_point = [job for job in grid.jobs if job.point == index]
        at = progress(grid, index)
        alive = [job for job in of_point if jobs[job.id].live]
        running = sum(jobs[job.id].word == "running" for job in alive) * grid.launcher.num_processes
        words = [jobs[job.id].word for job in of_point]
        rate = left = "-"
        if running and at.share_seconds and at.pending:
            rate = f"{60 * running / at.share_seconds:,.1f}"
            left = str(datetime.timedelta(seconds=round(at.pending * at.share_seconds / running)))
        rows.append([point.label, at.done, at.pending, at.failed,
                     ", ".join(f"{count} {word}" for word, count in Counter(words).items()) or "-", rate, left])
        pending += at.pending
        lines += [one_line(at.remark)] if at.remark else []
        if at.pending and not alive:
            missed += at.pending
            lines += [one_line(_why(grid, job, jobs[job.id])) for job in of_point if jobs[job.id].word != "completed"]
    shown = tabulate(rows, ["point", "done", "pending", "failed", "jobs", "samples/min", "left"], tablefmt="github",
                     intfmt=",", disable_numparse=True, colalign=("left", *["right"] * 3, "left", "right", "right"))
    if missed and cluster.is_here():
        lines.append(f"{missed:,} samples have no job: python -m dflash_mcmc.grid resume {grid.folder}")
    if not cluster.is_here():
        lines.append("SLURM is not on this machine: the table shows the last event that each job has noted")
    if not pending:
        folders = dict.fromkeys(str(Path(point.folder).parent) for point in grid.points)
        lines.append(f"all samples are drawn; now run: python -m dflash_mcmc.report {' '.join(folders)}")
    heading = f"{grid.folder} of {grid.created}; logs: {grid.folder / 'logs'}"
    return "\n".join([heading, "", shown, *([""] if lines else []), *lines])


def _why(grid: Grid, job: SlurmJob, state: State) -> str:
    """The line about a job that ended before its point was complete."""
    events = grid.events(job)
    shard = f", shard {job.shard + 1} of {job.shards}" if job.shards > 1 else ""
    at = f" on {state.node}" if state.node and state.node != "None assigned" else ""
    line = f"job {job.id} ({grid.points[job.point].label}{shard}): {' '.join([state.word, state.code]).strip()}{at}"
    log = f"; log: {grid.log_file(job)}" if grid.log_file(job).is_file() else ""
    if not events and state.word not in ("cancelled", "unknown"):
        return f"{line}: it has noted no event; check that its node can read {grid.folder}{log}"
    if events and events[-1]["reason"]:
        return f"{line}: {events[-1]['event']}: {events[-1]['reason']}{log}"
    return line + log


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    if arguments[:1] == ["submit"] and not {"-h", "--help"} & set(arguments):
        from dflash_mcmc.runner.plan import checked, only_shows

        overrides = ["-m", "hydra/launcher=slurm", *expand(arguments[1:])]
        planned = checked(overrides)
        if only_shows(planned, overrides):
            return
        if planned.launcher is None:
            raise UserError("hydra/launcher: given another launcher; allowed: slurm, or python -m dflash_mcmc for runs here")
        submission.submit(planned, planned.launcher)
        return
    parser = program.OneLineParser("python -m dflash_mcmc.grid", formatter_class=argparse.RawDescriptionHelpFormatter,
                            description="Grids of runs on SLURM. The shell is free at once; runs share the work and continue "
                            "after preemption.", epilog=_fields())
    commands = parser.add_subparsers(dest="do", required=True, metavar="submit|status|cancel|resume")
    commands.add_parser("submit", help="the overrides of python -m dflash_mcmc -m, and fields below: submit "
                                       "condition=greedy,ps shards=8")
    about = {"status": "show the state of points and jobs", "cancel": "cancel the jobs that wait or run",
             "resume": "submit jobs for missing samples, with the grid's own code; fields can be changed: resume minutes=240"}
    for name, text in about.items():
        subparser = commands.add_parser(name, help=text, description=text)
        subparser.add_argument("grid", nargs="*", metavar="GRID", help="folder of a grid; an experiment, or a folder "
                             "above grids, for the newest grid; default: the newest grid of all")
        subparser.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="FOLDER", help="default: outputs")
        if name == "status":
            subparser.add_argument("--every", type=float, metavar="SECONDS", help="repeat the table at this interval")
    options = parser.parse_args(arguments)
    command.prepare()
    fields = [name for name in options.grid if "=" in name]
    if fields and options.do != "resume":
        raise UserError(f"{options.do}: given {fields[0]}; allowed: names and folders of grids")
    grids = find([name for name in options.grid if name not in fields], options.outputs)
    if options.do == "cancel":
        for grid in grids:
            live = cluster.live([job.id for job in grid.jobs])
            cluster.cancel(live)
            print(f"{grid.folder}: {len(live)} jobs cancelled; recorded samples are kept")
    elif options.do == "resume":
        for grid in grids:
            submission.resume(grid, changed_launcher(grid.launcher, fields))
    else:
        print("\n\n".join(map(table, grids)), flush=True)
        while options.every is not None:
            time.sleep(options.every)
            print("\n" + "\n\n".join(map(table, grids)), flush=True)


def _fields() -> str:
    types = typing.get_type_hints(Slurm)
    lines = [f"  {field.name:<18} {spec_of(field).describe(types[field.name])}: {spec_of(field).help}"
             for field in dataclasses.fields(Slurm)]
    return "\n".join(["fields of hydra/launcher=slurm (elsewhere hydra.launcher.shards=8; yours: conf/local/slurm.yaml):",
                      *lines])


if __name__ == "__main__":
    main()
