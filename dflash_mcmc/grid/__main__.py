"""`python -m dflash_mcmc.grid submit|status|cancel|resume`: grids of runs on SLURM."""

from __future__ import annotations

import argparse
import dataclasses
import time
import typing
from pathlib import Path

from dflash_mcmc.config.launcher import Slurm, changed, expand
from dflash_mcmc.errors import UserError
from dflash_mcmc.fields import spec_of
from dflash_mcmc.process import program


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    if arguments[:1] == ["submit"] and not {"-h", "--help"} & set(arguments):
        _submit(arguments[1:])
        return
    options = _parser().parse_args(arguments)
    from dflash_mcmc.config import command
    from dflash_mcmc.grid.folder import find

    command.prepare()
    fields = [name for name in options.grid if "=" in name]
    if fields and options.do != "resume":
        raise UserError(f"{options.do}: given {fields[0]}; allowed: names and folders of grids")
    grids = find([name for name in options.grid if name not in fields], options.outputs)
    {"status": _status, "cancel": _cancel, "resume": _resume}[options.do](grids, options)


def _submit(overrides: list[str]) -> None:
    from dflash_mcmc.grid.submission import submit
    from dflash_mcmc.runner.commands import checked, only_shows

    arguments = ["-m", "hydra/launcher=slurm", *expand(overrides)]
    command = checked(arguments)
    if not only_shows(command, arguments):
        if command.launcher is None:
            raise UserError("hydra/launcher: given another launcher; allowed: slurm, or python -m dflash_mcmc for runs here")
        submit(command, command.launcher)


def _status(grids: list, options: argparse.Namespace) -> None:
    from dflash_mcmc.grid.status import table

    while True:
        print("\n\n".join(table(grid) for grid in grids), flush=True)
        if options.every is None:
            return
        time.sleep(options.every)
        print(flush=True)


def _cancel(grids: list, options: argparse.Namespace) -> None:
    from dflash_mcmc.grid import cluster

    for grid in grids:
        live = cluster.live([job.id for job in grid.jobs])
        cluster.cancel(live)
        print(f"{grid.folder}: {len(live)} jobs cancelled; recorded samples are kept")


def _resume(grids: list, options: argparse.Namespace) -> None:
    from dflash_mcmc.grid.submission import resume

    for grid in grids:
        resume(grid, changed(grid.launcher, [name for name in options.grid if "=" in name]))


def _parser() -> argparse.ArgumentParser:
    parser = program.OneLineParser("python -m dflash_mcmc.grid", formatter_class=argparse.RawDescriptionHelpFormatter,
                            description="Grids of runs on SLURM. The shell is free at once; runs share the work and continue "
                            "after preemption.", epilog=_fields())
    commands = parser.add_subparsers(dest="do", required=True, metavar="submit|status|cancel|resume")
    commands.add_parser("submit", help="the overrides of python -m dflash_mcmc -m, and fields below: submit "
                                       "condition=greedy,ps shards=8")
    about = {"status": "show the state of points and jobs", "cancel": "cancel the jobs that wait or run",
             "resume": "submit jobs for missing samples, with the grid's own code; fields can be changed: resume minutes=240"}
    for name, text in about.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("grid", nargs="*", metavar="GRID", help="folder of a grid; an experiment, or a folder "
                             "above grids, for the newest grid; default: the newest grid of all")
        command.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="FOLDER", help="default: outputs")
        if name == "status":
            command.add_argument("--every", type=float, metavar="SECONDS", help="repeat the table at this interval")
    return parser


def _fields() -> str:
    types = typing.get_type_hints(Slurm)
    lines = [f"  {field.name:<18} {spec_of(field).describe(types[field.name])}: {spec_of(field).help}"
             for field in dataclasses.fields(Slurm)]
    return "\n".join(["fields of hydra/launcher=slurm (elsewhere hydra.launcher.shards=8; yours: conf/local/slurm.yaml):",
                      *lines])


if __name__ == "__main__":
    main()
