"""`python -m dflash_mcmc.report RUNS...`: a page, Markdown, CSV files and figures from any set of runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dflash_mcmc.process import program


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits."""
    program.run(_main, arguments)


def _main(arguments: list[str]) -> None:
    given = _parser().parse_args(arguments)
    from dflash_mcmc.report.build import build  # after the command line is read: --help is instant

    built = build(given.runs, given.out, baseline=given.baseline, pair=given.pair, lenient=given.lenient,
                  outputs=given.outputs)
    print(built.overall)
    for warning in built.study.warnings:
        print(f"note: {warning}", file=sys.stderr)
    print(f"\n{built.page}")


def _parser() -> argparse.ArgumentParser:
    parser = program.OneLineParser("python -m dflash_mcmc.report",
                            description="A report from the records of any set of runs: report.html, report.md, tables/*.csv "
                            "and figures/*.png and *.svg.")
    parser.add_argument("runs", nargs="*", metavar="RUN",
                        help="folder of a run or of an experiment, glob, or id of a run in W&B")
    parser.add_argument("--baseline", metavar="RUN",
                        help="run that all others are compared with, by label, condition or identity; default: greedy")
    parser.add_argument("--pair", nargs=2, metavar=("A", "B"),
                        help="two runs whose answers are set side by side; default: power sampling without and with the blend")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: the folder report in that of the experiment")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="FOLDER",
                        help="where ids of W&B are looked up; default: outputs")
    parser.add_argument("--lenient", action="store_true",
                        help="where a file is corrupt, report the good part and say what was left out")
    return parser


if __name__ == "__main__":
    main()
