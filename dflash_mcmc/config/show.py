"""Lets Hydra show what its flags ask for, and says which option each group has."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dflash_mcmc.config import completion, flags
from dflash_mcmc.config.command import composer, prepare
from dflash_mcmc.config.groups import config_folder
from dflash_mcmc.config.overrides import readable

_SCRIPTS = {"install=bash": completion.INSTALL, "uninstall=bash": completion.UNINSTALL}


def show(arguments: Sequence[str]) -> None:
    """Prints what --cfg, --info, --hydra-help or --shell-completion ask for.

    The output of --cfg job begins with the option of each group as comments of YAML, because the values do not name it.
    """
    import hydra

    given = flags.parsed(arguments)
    if given.shell_completion and (script := _SCRIPTS.get(" ".join(given.overrides))):
        print(script)
        return
    if given.cfg in ("job", "all") and not given.package:
        print(_options(given.overrides), flush=True)
    prepare()
    sys.argv = [sys.argv[0], *map(readable, arguments)]
    hydra.main(config_path=str(config_folder()), config_name="config", version_base="1.3")(lambda composed: None)()


def _options(overrides: Sequence[str]) -> str:
    with composer("config", overrides) as composing:
        choices = composing.compose(overrides).choices
    own = {group: option for group, option in choices.items()
           if not group.startswith(("hydra/", "schema/")) and "@" not in group}
    width = max(map(len, own))
    return "\n".join(["# option of each group", *(f"#   {group:<{width}}  {option}" for group, option in own.items())])
