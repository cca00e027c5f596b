"""`python -m dflash_mcmc.catalogue`: every option of every group, with its meaning and its file; with a group, its fields."""

from __future__ import annotations

from pathlib import Path

from dflash_mcmc.config.command import config_folder
from dflash_mcmc.errors import UserError, did_you_mean
from dflash_mcmc.process import program, usage
from dflash_mcmc.registry import components


def options() -> dict[str, dict[str, tuple[str, Path]]]:
    """Group -> option -> (meaning, file): the first comment line of each file of `conf/`."""
    listed: dict[str, dict[str, tuple[str, Path]]] = {}
    for file in sorted(config_folder().glob("*/*.yaml")):
        comments = [line.lstrip("# ").strip() for line in file.read_text().splitlines()
                    if line.startswith("#") and "@package" not in line]
        listed.setdefault(file.parent.name, {})[file.stem] = (comments[0] if comments else "", file)
    return listed


def print_options() -> None:
    """All groups and options."""
    for group, entries in options().items():
        _print_group(group, entries)
    print("\nfields of a group: python -m dflash_mcmc.catalogue GROUP")


def _print_group(group: str, entries: dict[str, tuple[str, Path]]) -> None:
    print(f"{group}")
    width = max(map(len, entries))
    for name, (meaning, file) in entries.items():
        print(f"  {name:<{width}}  {meaning}  [{_short(file)}]")


def print_fields(group: str) -> None:
    """The fields of every component of a group."""
    found = components(group)
    for component in found.values():
        print(f"{group}/{component.name}: {component.summary}  [{_short(Path(component.file))}:{component.line}]")
        for line in usage.field_lines(component.cls):
            print(line)


def main() -> None:
    """Prints what is asked for."""
    program.run(_main)


def _main(arguments: list[str]) -> None:
    if not arguments:
        print_options()
        return
    from dflash_mcmc.registry import GROUPS

    known = options()
    for group in arguments:
        if group not in known:
            raise UserError(f"unknown group {group!r}{did_you_mean(group, known)}; allowed: {', '.join(known)}")
        if group in GROUPS:
            print_fields(group)
        else:  # values for the fields of other groups
            _print_group(group, known[group])


def _short(file: Path) -> str:
    try:
        return str(file.relative_to(Path.cwd()))
    except ValueError:
        return str(file)


if __name__ == "__main__":
    main()
