"""`python -m dflash_mcmc.export RUNS... --to inspect`: runs as logs of inspect_ai, which `inspect view` shows."""

import importlib.util
import sys
from pathlib import Path

from dflash_mcmc.errors import UserError
from dflash_mcmc.process import program


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    parser = program.OneLineParser("python -m dflash_mcmc.export", description="Writes runs of samples in the format of "
                                   "another program. Runs stay as they are.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, experiment folder, or glob")
    parser.add_argument("--to", required=True, choices=["inspect"], help="inspect: a log of inspect_ai for each run")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"), metavar="FOLDER",
                        help="folder of the logs, which `inspect view --log-dir` takes; default: logs")
    parser.add_argument("--format", choices=["eval", "json"], default="eval", help="format of a log; default: eval")
    parser.add_argument("--lenient", action="store_true", help="skip corrupt files and lines, and list what was left out")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("inspect_ai") is None:
        raise UserError("inspect_ai: is not installed; allowed: pip install -e '.[inspect]'")
    from dflash_mcmc.report import inspect_log, reading

    runs, left_out = reading.read(reading.run_folders(options.runs), options.lenient)
    for message in left_out:
        print(f"note: {message}", file=sys.stderr)
    for run in runs:
        print(inspect_log.write(run, options.log_dir, options.format))


if __name__ == "__main__":
    main()
