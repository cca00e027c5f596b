"""`python -m dflash_mcmc.regrade RUNS... grader=...`: grades recorded texts again. It samples no text and changes no record.

The new grades are written as a new run next to the old one (`grading.again`). Reports and statistics can read both. A run
with the new grader continues the new run. Each new record has the old grade in `before`. The command prints the changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from dflash_mcmc.errors import ConfigError, printable
from dflash_mcmc.grading.again import NoTexts, Regraded, regrade
from dflash_mcmc.process import program

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.report.reading import Found
    from dflash_mcmc.store.records import Record

_SHOWN = 20
"""Number of changed samples that are printed; the records have all of them."""
_WIDTH = 60


def report(regraded: Regraded) -> str:
    """The changes: accuracy, a table of old and new verdicts, and the changed samples."""
    from dflash_mcmc.report.parts import percent
    from dflash_mcmc.statistics.outcomes import accuracy

    records = regraded.records
    before: list[Record] = [{**record, "verdict": record["before"]["verdict"]} for record in records]
    changed = [record for record in records if record["verdict"] != record["before"]["verdict"]]
    old, new = (percent(*accuracy(graded)[:3]) for graded in (before, records))
    lines = [str(regraded.folder), "", f"accuracy {old} -> {new} of {len(records)} samples; {len(changed)} verdicts changed",
             "", _verdicts(records)]
    strings = [record["same_string"] for record in records if record["same_string"] is not None]
    if strings:
        lines += ["", "for comparison, by the string rule of published numbers: "
                  f"{100 * sum(strings) / len(records):.1f} %"]
    if changed:
        lines += ["", _changes(changed[:_SHOWN])]
    if len(changed) > _SHOWN:
        lines += [f"... and {len(changed) - _SHOWN} more"]
    return "\n".join([*lines, "", _where(regraded)])


def _where(regraded: Regraded) -> str:
    if regraded.target == regraded.folder:
        return "the run has this grader, settings and version: nothing was written"
    return f"written: {regraded.target}"


def _verdicts(records: Sequence[Record]) -> str:
    counts = Counter((record["before"]["verdict"], record["verdict"]) for record in records)
    old, new = (sorted({pair[place] for pair in counts}) for place in (0, 1))
    cells = [[name, *(counts[name, other] or "" for other in new), sum(counts[name, other] for other in new)] for name in old]
    totals = ["all", *(sum(counts[name, other] for name in old) for other in new), len(records)]
    return tabulate([*cells, totals], headers=["recorded / now", *new, "all"], tablefmt="github",
                    colalign=("left", *["right"] * (len(new) + 1)))


def _changes(records: Sequence[Record]) -> str:
    cells = [[_short(record["problem"]), record["chain"], _short(record["gold"]), _short(record["answer"]),
              f"{record['before']['verdict']} -> {record['verdict']}", record["rule"]] for record in records]
    headers = ["problem", "chain", "gold", "answer", "verdict", "rule"]
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def _short(text: object) -> str:
    shown = printable(" ".join(str(text).split()))
    return shown if len(shown) <= _WIDTH else shown[:_WIDTH - 3] + "..."


def grader_config(overrides: Sequence[str]) -> Config:
    """A configuration with the grader of the overrides. Raises UserError for an override of another group."""
    from dflash_mcmc.config.command import compose_once
    from dflash_mcmc.config.schema import Config

    for text in overrides:
        name, _, value = text.lstrip("+~").partition("=")
        if name.partition(".")[0] != "grader":
            raise ConfigError(name, value, "grader=... and its fields, such as grader.timeout_seconds=8")
    config, _ = compose_once("config", overrides, Config)
    config.grader.check(config)
    config.grader = config.grader.resolved(config)
    config.grader.preflight()
    return config


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits."""
    program.run(_main, arguments)


def _main(arguments: list[str]) -> None:
    parser = program.OneLineParser("python -m dflash_mcmc.regrade",
                            description="Grades recorded texts again and shows the changes.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run or of an experiment, glob, or id of a run in "
                        "W&B; and overrides of the grader: grader=math grader.timeout_seconds=8")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="FOLDER", help="folder in which ids of W&B "
                        "are looked up; default: outputs")
    given = parser.parse_args(arguments)
    from dflash_mcmc.report.reading import run_folders

    overrides = [text for text in given.runs if "=" in text and not Path(text).exists()]
    runs = run_folders([text for text in given.runs if text not in overrides], given.outputs)
    config = grader_config(overrides)
    print("\n\n".join(_reports(runs, config)))


def _reports(runs: Sequence[Found], config: Config) -> Iterator[str]:
    """The changes of each run. A run without texts is left out; it is an error only if the command names that run."""
    pool = config.grader.start()
    try:
        for folder, named in runs:
            try:
                yield report(regrade(folder, config, pool))
            except NoTexts as error:
                if named:
                    raise
                yield f"left out: {error}"
    finally:
        pool.close()


if __name__ == "__main__":
    main()
