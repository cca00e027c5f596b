"""The text of `python -m dflash_mcmc --help`. It needs no composed configuration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from dflash_mcmc import __version__
from dflash_mcmc.config.groups import option_files

_TEXT = """\
Experiments on how to sample from a language model: python -m dflash_mcmc [group=option ...] [field=value ...]

Groups and their options (meanings: python -m dflash_mcmc.catalogue; fields: python -m dflash_mcmc.catalogue GROUP)

{options}

Sweep: sweep=alpha_beta, or -m condition=greedy,ps sampler.alpha=2,4
Fields left out where options lack them: --if-present=blend.beta,sampler.temperature
What it will cost: dry_run=true     The prompt: show=prompt
Values of a command line: --cfg job     How they are composed: --info
Options of your own: --config-dir FOLDER     Flags of Hydra: --hydra-help
"""


def is_asked_for(arguments: Sequence[str]) -> bool:
    """Whether the command line has `--help` or `-h`."""
    return not {"-h", "--help"}.isdisjoint(arguments)


def shown(arguments: Sequence[str]) -> str:
    """What `--version` or `--help` prints; empty if the command line has neither."""
    if "--version" in arguments:
        return f"dflash_mcmc {__version__}\n"
    return text(arguments) if is_asked_for(arguments) else ""


def text(arguments: Sequence[str]) -> str:
    """The help, with the options of `--config-dir`, if the command line has one."""
    groups = option_files(_own_folders(arguments))
    width = max(map(len, groups))
    return _TEXT.format(options="\n".join(f"  {group:<{width}}  {'  '.join(names)}" for group, names in groups.items()))


def _own_folders(arguments: Sequence[str]) -> list[Path]:
    """The folder after `--config-dir` or `-cd`, or in `--config-dir=FOLDER`."""
    flags = ("--config-dir", "-cd")
    after = [following for flag, following in itertools.pairwise(arguments) if flag in flags]
    joined = [text.partition("=")[2] for text in arguments if text.startswith("--config-dir=")]
    return [Path(folder) for folder in (*after, *joined)]
