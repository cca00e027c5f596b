"""A command line before its first run: the checks that load no model, and what it only shows."""

from __future__ import annotations

from time import sleep

from dflash_mcmc.config.command import Command, check_command
from dflash_mcmc.errors import UserError, printable
from dflash_mcmc.process import ranks
from dflash_mcmc.runner import preflight

_SECONDS_TO_REPORT = 60.0
"""Seconds that a process waits for the first process of a launch, which may still be starting, to report a mistake."""


def checked(arguments: list[str]) -> Command:
    """The command of a command line, after every check that loads no model. Raises UserError."""
    try:
        command = check_command(arguments)
        if command.jobs and ranks.world_size() > 1 and (command.launcher or (command.sweep and command.sweep.searches)):
            given, does = ("hydra/launcher: given slurm", "submits the jobs") if command.launcher else (
                "hydra/sweeper: given a search", "chooses the points")
            raise UserError(f"{given} in a launch of {ranks.world_size()} processes; allowed: in one process, which {does}")
        # The command after a check of its jobs, with their encoded prompts, their lengths and their memory
        memory, of_jobs = preflight.check(command.jobs, here=not command.launcher)
        jobs = [job._replace(prompts=of_job.prompts) for job, of_job in zip(command.jobs, of_jobs, strict=True)]
        return command._replace(jobs=jobs, memory=memory, lengths=tuple(of_job.lengths for of_job in of_jobs))
    except UserError:
        if ranks.rank():
            # Every process of a launch finds the same mistake, and the first one reports it. This process must not end before
            # that, because a launcher ends all processes when one of them ends. It waits, and then reports the mistake, too.
            sleep(_SECONDS_TO_REPORT)
        raise


def only_shows(command: Command, arguments: list[str]) -> bool:
    """Prints what a command that runs nothing asks for: a flag of Hydra, show=prompt or dry_run. False for other commands."""
    if command.shows:
        from dflash_mcmc.config.command import show_for_flag

        show_for_flag(arguments)
    elif any(job.config.show for job in command.jobs):
        from dflash_mcmc.chains.build import first_prompt

        if not ranks.rank():
            print("\n\n".join(dict.fromkeys(printable(first_prompt(job.config), keep="\n\t") for job in command.jobs)))
    elif any(job.config.dry_run for job in command.jobs):
        print_plan(command, "dry_run=true: no model was loaded and nothing written")
    else:
        return False
    return True


def print_plan(command: Command, *notes: str) -> None:
    """Prints the runs of a command. Each run has the fields that it leaves out, its samples and its expected cost."""
    from dflash_mcmc.runner import estimate

    if not ranks.rank():
        print(estimate.of(command), *filter(None, [command.memory]), *notes, sep="\n", flush=True)
