"""The single entrypoint: `python -m dflash_mcmc`, or `dflash-mcmc`.

Exit codes: 0 done; 2 something to mend in the command, the configuration or the files; 130 stopped with Ctrl-C.
DFLASH_MCMC_TRACEBACK=1 shows the traceback of an error that is otherwise told in one line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from dflash_mcmc import ranks
from dflash_mcmc.cli import check_command, config_folder, prepare
from dflash_mcmc.config import to_config
from dflash_mcmc.errors import UserError
from dflash_mcmc.registry import name_of

_HINT = "nothing recorded is lost: run the same command again and it goes on from there"


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits."""
    arguments = sys.argv[1:] if arguments is None else arguments
    sys.exit(guarded(lambda: _main(arguments)))


def guarded(program) -> int:
    """Exit code of a program whose user errors are one line each."""
    try:
        program()
        return 0
    except UserError as error:
        if os.environ.get("DFLASH_MCMC_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"\nstopped; {_HINT}", file=sys.stderr)
        return 130


def _main(arguments: list[str]) -> None:
    prepare()
    try:
        check_command(arguments)
    except UserError:
        if ranks.rank():  # every process of a launch finds the same; one tells it
            sys.exit(2)
        raise
    folders: list[Path] = []
    probed: list[Path] = []

    def task(composed: DictConfig) -> float | None:
        config = to_config(composed)
        probes = name_of(config.probe) != "none"
        if probes:
            from dflash_mcmc.probing import execute
        else:
            from dflash_mcmc.run import execute

        result = execute(config)
        unit = config.probe.unit if probes else "sample"
        drawn = f"{result.num_new} new {unit}s" if result.num_new else "complete before, nothing drawn"
        beyond = f"; {result.num_beyond} more than asked for are recorded, and counted" if result.num_beyond else ""
        if not ranks.rank():
            print(f"{result.folder}: {drawn}{beyond}")
            (probed if probes else folders).append(result.folder)
        return result.summary.get("accuracy")

    sys.argv = [sys.argv[0], *arguments]
    wrapped = hydra.main(config_path=str(config_folder()), config_name="config", version_base="1.3")(_reraised(task))
    wrapped()
    if folders:
        from dflash_mcmc.report.table import overall

        print("\n" + overall(list(dict.fromkeys(folders))))
    if probed:
        from dflash_mcmc.report import probed as tables

        print("\n" + tables.overall(list(dict.fromkeys(probed))))


def _reraised(task):
    """Hydra would print a traceback for an Exception; a SystemExit passes through it."""
    def wrapper(composed: DictConfig) -> float | None:
        try:
            return task(composed)
        except UserError as error:
            if os.environ.get("DFLASH_MCMC_TRACEBACK"):
                raise
            process = f" (process {ranks.rank()})" if ranks.rank() else ""
            print(f"error{process}: {error}", file=sys.stderr)
            sys.exit(2)
    return wrapper


if __name__ == "__main__":
    main()
