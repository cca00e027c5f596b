"""`python -m dflash_mcmc.report RUNS...`: a page, Markdown, CSV tables and figures for any set of runs."""

from pathlib import Path

from dflash_mcmc.errors import tell
from dflash_mcmc.process import program


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    parser = program.OneLineParser("python -m dflash_mcmc.report",
                            description="Writes a report of any set of runs from their records: report.html, report.md, "
                            "tables/*.csv, figures/*.png and figures/*.svg.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folder, experiment folder, or glob")
    parser.add_argument("--baseline", metavar="RUN",
                        help="run to compare all others with, by label, condition or identity; default: greedy")
    parser.add_argument("--pair", nargs=2, metavar=("A", "B"),
                        help="two runs to compare answer by answer; default: power sampling without and with the blend")
    parser.add_argument("--out", type=Path, metavar="FOLDER",
                        help="folder to write to; default: `report` in the experiment folder")
    parser.add_argument("--alpha", nargs="+", type=float, default=(), metavar="ALPHA",
                        help="exponents of the power votes in the table of vote rules; default: vote.power.alpha of each run")
    parser.add_argument("--format", nargs="+", choices=("pdf", "latex"), default=(), metavar="FORMAT",
                        help="pdf: figures as PDF, too, with embedded fonts; latex: tables as LaTeX (booktabs)")
    parser.add_argument("--lenient", action="store_true", help="skip corrupt files and lines, and list what was left out")
    options = parser.parse_args(arguments)
    from dflash_mcmc.report.build import build  # after parsing, so that --help stays fast

    built = build(options.runs, options.out, baseline=options.baseline, pair=options.pair, lenient=options.lenient,
                  alphas=options.alpha, formats=options.format)
    print("\n\n".join([built.overall, *(line for part in built.parts for line in part.verdict)]))
    for warning in built.parts[0].warnings:
        tell(f"note: {warning}")
    print(f"\n{built.page}")


if __name__ == "__main__":
    main()
