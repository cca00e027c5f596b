"""The single entrypoint: `python -m dflash_mcmc`, or `dflash-mcmc`. Exit codes: `process/program.py`."""

import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_mcmc.config import help
from dflash_mcmc.process import program, ranks

if TYPE_CHECKING:
    from dflash_mcmc.config.command import Command
    from dflash_mcmc.config.schema import Job
    from dflash_mcmc.types import RunResult

Tables = dict[Callable[[list[Path]], str], list[Path]]
"""Folders of complete runs by the function that renders them as one table."""


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits. A first word such as `report` runs that program."""
    if arguments and arguments[0] in help.PROGRAMS:
        sys.argv = [f"dflash-mcmc {arguments[0]}", *arguments[1:]]
        runpy.run_module(f"dflash_mcmc.{arguments[0]}", run_name="__main__", alter_sys=True)
    if text := help.text_for(arguments):
        print(text, end="")
        return
    from dflash_mcmc.runner.plan import checked, only_shows

    command = checked(arguments)
    if only_shows(command, arguments):
        return
    if command.launcher:
        from dflash_mcmc.grid.submission import submit

        submit(command, command.launcher)
    elif command.is_sweep:
        sys.exit(_run_sweep(command))
    else:
        _run_single(command)


def _run_single(command: "Command") -> None:
    tables: Tables = {}
    _run(command.jobs[0], tables)
    _print_tables(tables)


def _run_sweep(command: "Command") -> int:
    """Runs every point of a sweep. Returns the exit code."""
    from dflash_mcmc.config.command import report, run_jobs
    from dflash_mcmc.runner.plan import print_plan

    print_plan(command)
    tables: Tables = {}
    outcomes = run_jobs(command.jobs, lambda job: _run(job, tables))
    _print_tables(tables)
    return 0 if ranks.rank() else report(outcomes)


def _run(job: "Job", tables: Tables) -> "RunResult":
    """Executes a job and prints its result in a line; a complete run is added to `tables`."""
    from dflash_mcmc.runner.loop import execute

    result = execute(job)
    if ranks.rank():
        return result
    print(result.line())
    if not result.num_left:
        tables.setdefault(result.table, []).append(result.folder)
    return result


def _print_tables(tables: Tables) -> None:
    for table, folders in tables.items():
        print("\n" + table(list(dict.fromkeys(folders))))
    runs = dict.fromkeys(folder for folders in tables.values() for folder in folders)
    if len(runs) > 1:
        parents = dict.fromkeys(str(run.parent) for run in runs)
        print(f"\nreport of these runs: python -m dflash_mcmc.report {shlex.join(parents)}")


if __name__ == "__main__":
    main()
