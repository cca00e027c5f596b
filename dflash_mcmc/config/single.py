"""Programs beside the run, `verify` and `drafts check`: options of their own, and overrides of a single job."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

from dflash_mcmc.config.command import check_command
from dflash_mcmc.config.schema import Job
from dflash_mcmc.errors import UserError


def options_of(parser: ArgumentParser, arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """A program's own options, and the overrides. Raises UserError for an option that it does not have."""
    given, overrides = parser.parse_known_args(arguments)
    if unknown := [text for text in overrides if text.startswith("-")]:
        raise UserError(f"{unknown[0]}: not an option; see {parser.prog} --help")
    return given, overrides


def single_job(program: str, overrides: Sequence[str], groups: Sequence[str], add: Callable[[set[str]], list[str]]) -> Job:
    """The checked job of overrides of some groups, after those that `add` makes of the given names. Raises UserError."""
    names = {text.partition("=")[0].lstrip("+~") for text in overrides}
    if others := [name for name in names if name.partition(".")[0] not in groups]:
        raise UserError(f"{min(others)}: given with {program}; allowed: {', '.join(groups)}, and their fields")
    command = check_command([*add(names), *overrides])
    if len(command.jobs) != 1 or command.sweep is not None:
        raise UserError(f"{program}: given several values or a flag of Hydra; allowed: one value of each field")
    return command.jobs[0]
