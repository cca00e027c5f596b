"""`python -m dflash_mcmc.compare A B ...`: paired differences of anybody's logs, with intervals, Holm and power.

Nothing imports this file: `dflash_mcmc.compare` is the function of the same name.
"""

from pathlib import Path

from dflash_mcmc.errors import tell
from dflash_mcmc.process import program


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    parser = program.OneLineParser("python -m dflash_mcmc.compare", description="Compares logs of evaluations with the first "
                                   "of them, problem by problem.")
    parser.add_argument("logs", nargs="+", metavar="[NAME=]LOG", help="log of Inspect (.eval, .json), samples_*.jsonl of "
                        "lm-evaluation-harness, .csv or .jsonl with problem, score and chain, or run folder")
    parser.add_argument("--score", metavar="NAME", help="the score to compare, where a log has several: a scorer of Inspect, "
                        "or FILTER, METRIC or FILTER/METRIC of lm-evaluation-harness")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write a page, its table and figure there")
    options = parser.parse_args(arguments)
    from dflash_mcmc.report.comparison import compared, read_all
    from dflash_mcmc.report.parts import as_text

    found = compared(read_all(options.logs, options.score))
    print(as_text(found.table))
    for note in found.notes:
        tell(f"note: {note}")
    if options.out:
        print(f"\n{found.write(options.out)}")


if __name__ == "__main__":
    main()
