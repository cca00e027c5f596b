"""`python -m dflash_mcmc.catalogue` lists every option with its meaning and its file; with a group it lists the fields."""

from __future__ import annotations

from pathlib import Path

from dflash_mcmc.config.help import is_asked_for, meaning_of, option_files
from dflash_mcmc.errors import UserError, did_you_mean
from dflash_mcmc.process import program

_HELP = """\
usage: python -m dflash_mcmc.catalogue [GROUP ...]

Lists the options of all groups, each with its meaning and its file. With GROUP it lists the fields of the group's components,
each with its meaning, its allowed values and its default; a group of presets, such as condition, has options only.
"""


def options() -> dict[str, dict[str, tuple[str, Path]]]:
    """Group -> option -> (meaning, file). `meaning_of` says where the meaning stands."""
    return {group: {name: (meaning_of(group, name, file), file) for name, file in files.items()}
            for group, files in option_files().items()}


def print_options() -> None:
    """Prints all groups and their options."""
    for group, entries in options().items():
        _print_group(group, entries)
    print("\nfields of a group: python -m dflash_mcmc.catalogue GROUP")


def _print_group(group: str, entries: dict[str, tuple[str, Path]]) -> None:
    print(f"{group}")
    width = max(map(len, entries))
    for name, (meaning, file) in entries.items():
        print(f"  {name:<{width}}  {meaning}  [{_short(file)}]")


def print_fields(group: str) -> None:
    """Prints the fields of every component of a group."""
    from dflash_mcmc.config import help
    from dflash_mcmc.registry import components

    for component in components(group).values():
        print(f"{group}/{component.name}: {component.summary}  [{_short(Path(component.file))}:{component.line}]")
        for line in help.field_lines(component.cls):
            print(line)


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    if is_asked_for(arguments):
        print(_HELP)
        return
    if not arguments:
        print_options()
        return
    from dflash_mcmc.registry import GROUPS

    groups = options()
    for group in arguments:
        if group not in groups:
            raise UserError(f"unknown group {group!r}{did_you_mean(group, groups)}; allowed: {', '.join(groups)}")
    for group in arguments:
        if group in GROUPS:
            print_fields(group)
        else:  # its options set fields of other groups
            _print_group(group, groups[group])


def _short(file: Path) -> str:
    try:
        return str(file.relative_to(Path.cwd()))
    except ValueError:
        return str(file)


if __name__ == "__main__":
    main()
