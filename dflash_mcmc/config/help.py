"""The texts of `--help` and `--help GROUP`, and the options in `conf/`.

Imports neither Hydra nor the components but for the fields of a group, so that help costs no time.
"""

import dataclasses
import itertools
import typing
from collections.abc import Sequence
from pathlib import Path

from dflash_mcmc import __version__
from dflash_mcmc.errors import UserError, did_you_mean
from dflash_mcmc.options import meaning_of, option_files

_PACKAGE = Path(__file__).resolve().parent.parent
_TEXT = """\
Experiments on how to sample from a language model: python -m dflash_mcmc [group=option ...] [field=value ...]

Start with condition=greedy, temp (temperature 1/4), ps (power sampling) or blend_ps (of a target blended with a layer).

Groups and their options (meanings and fields: python -m dflash_mcmc --help GROUP)

{options}

Sweep: sweep=alpha_beta, or -m condition=greedy,ps sampler.alpha=2,4
What it will cost: dry_run=true     The prompt: show=prompt
Values of a command line: --cfg job     How they are composed: --info
Options of your own: --config-dir FOLDER     Flags of Hydra: --hydra-help
Other programs: dflash-mcmc NAME ... or python -m dflash_mcmc.NAME ..., each with --help:
  {programs}
"""
_FIRST = ("greedy", "temp", "ps", "blend_ps")
_OF_FIELDS = "A field is set by FIELD=VALUE. Fields marked identity change the result; fields marked runtime do not."
PROGRAMS = {"report": "a page of any runs", "compare": "paired statistics of anybody's logs",
            "fetch": "models and drafts by name", "regrade": "grades again",
            "verify": "audits an engine", "serve": "an OpenAI server", "grid": "sweeps on SLURM", "train": "a draft"}


def options() -> dict[str, dict[str, tuple[str, Path]]]:
    """Group -> option -> (meaning, file)."""
    return {group: {name: (meaning_of(group, name, file), file) for name, file in files.items()}
            for group, files in option_files().items()}


def is_asked_for(arguments: Sequence[str]) -> bool:
    """Whether the command line has `--help` or `-h`."""
    return not {"-h", "--help"}.isdisjoint(arguments)


def text_for(arguments: Sequence[str]) -> str:
    """What `--version` or `--help` prints; empty if the command line has neither.

    The help has the options of `--config-dir`, if the command line has one. It is that of groups that are named, if there are
    any. Raises UserError for an unknown group.
    """
    if "--version" in arguments:
        return f"dflash_mcmc {__version__}\n"
    if not is_asked_for(arguments):
        return ""
    # The folder after `--config-dir` or `-cd`, or in `--config-dir=FOLDER`
    flags = ("--config-dir", "-cd")
    after = [following for flag, following in itertools.pairwise(arguments) if flag in flags]
    joined = [text.partition("=")[2] for text in arguments if text.startswith("--config-dir=")]
    own = [Path(folder) for folder in (*after, *joined)]
    groups = option_files(own)
    named = [text for text in arguments if not text.startswith("-") and "=" not in text and Path(text) not in own]
    for group in named:
        if group not in groups:
            raise UserError(f"--help: given {group!r}{did_you_mean(group, groups)}; allowed: {', '.join(groups)}")
    if named:
        return "".join(_text_of(group, groups[group]) for group in named) + f"\n{_OF_FIELDS}\n"
    width = max(map(len, groups))
    shown = {group: "  ".join(names) for group, names in groups.items()}
    first = [name for name in _FIRST if name in groups["condition"]]
    shown["condition"] = f"{'  '.join(first)}  and {len(groups['condition']) - len(first)} more"
    return _TEXT.format(programs="\n  ".join(f"{name:<8}  {what}" for name, what in PROGRAMS.items()),
                        options="\n".join(f"  {group:<{width}}  {names}" for group, names in shown.items()))


def _text_of(group: str, files: dict[str, Path]) -> str:
    """The options of a group with meanings and files, and the fields of its components. A group of presets has none."""
    from dflash_mcmc.components import GROUPS, registered

    width = max(map(len, files))
    lines = [group, *(f"  {name:<{width}}  {meaning_of(group, name, file)}  [{_short(file)}]" for name, file in files.items())]
    for component in registered(group).values() if group in GROUPS else ():
        lines += ["", f"{group}/{component.name}: {component.summary}  [{_short(Path(component.file))}:{component.line}]",
                  *field_lines(component.cls)]
    return "\n".join(lines) + "\n"


def _short(file: Path) -> str:
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def usage_of(description: str, plans: dict[str, type]) -> str:
    """The description, then the fields of each plan below its heading. `plans` maps headings to configuration classes."""
    sections = ["\n".join([f"{heading}:", *field_lines(plan)]) for heading, plan in plans.items()]
    return "\n\n".join([description.strip(), *sections, _OF_FIELDS])


def field_lines(plan: type) -> list[str]:
    """Role, allowed values, default and meaning of every field, one field a line. Names of nested fields are dotted."""
    from dflash_mcmc.components import schema_of

    fields = _fields(schema_of(plan), "")
    width = max([20, *(len(name) for name, *_ in fields)])
    return [f"  {name:<{width}} {role:<9} {meaning}" for name, role, meaning in fields]


def _fields(plan: type, prefix: str) -> list[tuple[str, str, str]]:
    """(name, role, meaning) of each field; fields without a specification are groups and are left out."""
    from dflash_mcmc.components import has_spec, shown_default, spec_of

    rows, types = [], typing.get_type_hints(plan)
    for field in dataclasses.fields(plan):
        declared = types[field.name]
        if isinstance(declared, type) and dataclasses.is_dataclass(declared):
            rows += _fields(declared, f"{prefix}{field.name}.")
        elif has_spec(field):
            spec = spec_of(field)
            allowed = f"{spec.describe(declared)}; default {shown_default(field)}"
            rows.append((prefix + field.name, spec.role, f"{allowed}: {spec.help}"))
    return rows
