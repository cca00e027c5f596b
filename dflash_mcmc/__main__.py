"""The single entrypoint: `python -m dflash_mcmc`, or `dflash-mcmc`. Exit codes: `program.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from dflash_mcmc.config import sweep as sweeps
from dflash_mcmc.config.checks import to_config
from dflash_mcmc.config.command import Command, check_command, config_folder, prepare
from dflash_mcmc.config.jobs import Job
from dflash_mcmc.config.schema import Config
from dflash_mcmc.errors import UserError
from dflash_mcmc.process import program, ranks
from dflash_mcmc.run import estimate
from dflash_mcmc.run.build import first_prompt

if TYPE_CHECKING:
    from dflash_mcmc.run.samples import RunResult

_SECONDS_TO_TELL = 60.0
"""In which the first process of a launch, which may still be starting, tells what is wrong with the command line."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits."""
    program.run(_main, arguments)


def _main(arguments: list[str]) -> None:
    prepare()
    command = _checked(arguments)
    if any(job.config.show for job in command.jobs):
        if not ranks.rank():
            print("\n\n".join(dict.fromkeys(first_prompt(job.config) for job in command.jobs)))
        return
    if any(job.config.dry_run for job in command.jobs):
        if not ranks.rank():
            print(estimate.table(command.jobs, command.sweep.num_trials if command.sweep else None))
        return
    if command.launcher and command.jobs:
        from dflash_mcmc.grid.submission import submit

        submit(command)
        return
    folders: dict[str, list[Path]] = {"run": [], "probe": []}

    def task(composed: DictConfig) -> tuple[RunResult, float | None]:
        config = to_config(composed)
        result = _run(config)
        if not ranks.rank() and not result.num_left:
            folders["run" if config.probe.is_null else "probe"].append(result.folder)
        return result, sweeps.objective_of(config.objective, result.summary)

    outcomes = sweeps.SweepOutcomes(command.sweep) if command.sweep else None
    sys.argv = [sys.argv[0], *command.arguments]
    if outcomes:
        os.environ["HYDRA_FULL_ERROR"] = "1"  # what its sweeper raises comes to us
    try:
        hydra.main(config_path=str(config_folder()), config_name="config", version_base="1.3")(
            outcomes.job(task) if outcomes else _reraised(task))()
    except ValueError:
        if not (outcomes and outcomes.all_failed):  # then there is no best trial, and that is its exception
            raise
    _print_tables(folders)
    if outcomes and not ranks.rank():
        sys.exit(outcomes.tell(command.jobs[0].config.objective))


def _checked(arguments: list[str]) -> Command:
    try:
        command = check_command(arguments)
        if command.launcher and command.jobs and ranks.world_size() > 1:
            raise UserError(f"hydra/launcher: given slurm in a launch of {ranks.world_size()} processes; allowed: in one "
                            "process, which submits the jobs")
        if command.sweep and not command.launcher:
            _check_problems(command.jobs)
        return command
    except UserError:
        if ranks.rank():
            # Every process of a launch finds the same, and the first tells it. But a launcher ends all with the first that
            # goes, so that one which went in silence could take the message with it. Alone with a mistake, it tells it.
            sleep(_SECONDS_TO_TELL)
        raise


def _check_problems(jobs: list[Job]) -> None:
    """That every point's problems can be had, before the first point starts. Raises UserError."""
    drawn = [job.config.dataset for job in jobs if not (job.config.show or job.config.dry_run)]
    for dataset in {repr(dataset): dataset for dataset in drawn}.values():
        dataset.problems()


def _run(config: Config) -> RunResult:
    """Runs what a configuration asks for, and tells it in a line."""
    probes = not config.probe.is_null
    if probes:
        from dflash_mcmc.run.probing import execute
    else:
        from dflash_mcmc.run.samples import execute

    result = execute(config)
    unit = config.probe.unit if probes else "sample"
    drawn = f"{result.num_new} new {unit}s" if result.num_new else "complete before, nothing drawn"
    beyond = f"; {result.num_beyond} more than asked for are recorded, and counted" if result.num_beyond else ""
    left = f"; {result.num_left} more are being drawn by other processes" if result.num_left else ""
    if not ranks.rank():
        print(f"{result.folder}: {drawn}{beyond}{left}")
    return result


def _print_tables(folders: dict[str, list[Path]]) -> None:
    if folders["run"]:
        from dflash_mcmc.report.table import overall

        print("\n" + overall(list(dict.fromkeys(folders["run"]))))
    if folders["probe"]:
        from dflash_mcmc.report import probed

        print("\n" + probed.overall(list(dict.fromkeys(folders["probe"]))))


def _reraised(task):
    """Hydra would print a traceback for an Exception; a SystemExit passes through it."""
    def wrapper(composed: DictConfig) -> None:
        try:
            task(composed)
        except UserError as error:
            if os.environ.get("DFLASH_MCMC_TRACEBACK"):
                raise
            sweeps.tell(str(error))
            sys.exit(2)
    return wrapper


if __name__ == "__main__":
    main()
