"""`python -m dflash_mcmc.regrade RUNS... grader=...`: grades recorded texts again. It samples no text and changes no record.

The new grades are written as a new run next to the old one, which is not changed. The new run has the identity that a run with
the new grader has, so a run with that grader continues it. Reports and statistics can read both. Each new record has the old
grade in `before`. The command prints the changes.
"""

import datetime
import importlib.metadata
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from tabulate import tabulate

from dflash_mcmc.components import check_bounds, registered, specs_of
from dflash_mcmc.config.command import compose_once
from dflash_mcmc.config.identity import as_yaml, configuration_of, plain, settings_of
from dflash_mcmc.config.schema import Config
from dflash_mcmc.errors import ConfigError, UserError, printable
from dflash_mcmc.grading import label
from dflash_mcmc.grading.extraction import continued
from dflash_mcmc.grading.verdicts import UNDRAWN, GradingPool
from dflash_mcmc.process import program
from dflash_mcmc.report.parts import percent
from dflash_mcmc.report.reading import Found, run_folders
from dflash_mcmc.runner.tasks import summary_of
from dflash_mcmc.statistics.estimates import accuracy
from dflash_mcmc.statistics.votes import Vote
from dflash_mcmc.store import records as stored
from dflash_mcmc.store.files import is_there, write_atomically
from dflash_mcmc.store.folder import closed
from dflash_mcmc.store.records import PROBLEMS, RECORDS, RUN, Record, SampleKey, hash_of, key_of, read_records
from dflash_mcmc.types import Grade

_PACKAGES = ("math-verify", "latex2sympy2_extended", "sympy")
_SHOWN = 20
"""Number of changed samples that are printed; the records have all of them."""
_WIDTH = 60


class NotRegraded(UserError):
    """A run of a probe or without records, or one whose regraded folder has samples of its own."""


class Regraded(NamedTuple):
    """Result of regrading one run."""

    folder: Path
    """Folder of the run that was regraded."""
    target: Path
    """Folder of the run with the new grades. If the grader is the same, this is `folder`, and nothing is written."""
    records: list[Record]
    """The records of `folder` with the new grades; the old grades are in `before`. The target may contain further records that
    were regraded from another run."""


def regrade(folder: Path, config: Config, pool: GradingPool) -> Regraded:
    """Grades the records of a run with the grader of `config`, whose started pool is `pool`, and writes the new run.

    The records are written in one step. A process that is killed before this step leaves no records. Raises NotRegraded for a
    run without texts or a target with samples of its own, RunBusy for a run that another process is writing, and UserError
    for unreadable files or a target that has other texts.
    """
    with closed(folder):
        (own_identity, sessions), configured = stored.described(folder / RUN), configuration_of(folder)
        records = [] if "probe" in own_identity else read_records(folder, stored.sample_schema())
    if not records:
        lacking = "texts" if "probe" in own_identity else "records"
        raise NotRegraded(f"{folder}: cannot be graded again: it has no {lacking}; allowed: a run of samples")
    identity = {name: value for name, value in own_identity.items() if not _of_grader(name)} | settings(config)
    target = folder.parent / "-".join([*folder.name.split("-")[:-1], hash_of(identity)])  # next to it
    _refuse_own_samples(target, folder)
    own = configured.get("model", {}).get("thinking")
    # The records with new grades
    problems = stored.read_problems(folder)
    name = label(config.grader)
    for index, record in enumerate(records):
        if record["verdict"] not in UNDRAWN:
            problem = problems.get(record["problem"])
            prompt, question = (problem["prompt"], problem["question"]) if problem else ("", "")
            pool.submit(index, continued(prompt, record["text"], own), record["gold"], question)
    grades = dict(pool.finished(wait=True))
    # The old grade is in `before`. Without a new grade a record keeps its verdict. `grade_seconds` stays that of the run: the
    # same texts with the same grader give the same bytes.
    new = list[Record]()
    for index, record in enumerate(records):
        old: Mapping[str, object] = record
        before = {field: old[field] for field in (*Grade._fields, "grader") if field in old and field != "grade_seconds"}
        grade = grades.get(index)
        changed = {} if grade is None else {
            "verdict": grade.verdict, "answer": grade.answer, "rule": grade.rule, "reason": grade.reason,
            "same_string": grade.same_string, "walls": grade.walls, **grade.shown()}
        new.append(cast("Record", {**record, **changed, "grader": name, "before": before}))
    regraded = Regraded(folder, target, new)
    if target != folder:
        _write(regraded, identity, sessions, configured, config)
    return regraded


def settings(config: Config) -> dict[str, object]:
    """The settings of the grader that are part of a run's identity."""
    return {name: value for name, value in settings_of(config).items() if _of_grader(name)}


def _of_grader(name: str) -> bool:
    return name.partition(".")[0] == "grader"


def _refuse_own_samples(target: Path, folder: Path) -> None:
    if target == folder or not target.is_dir():
        return
    own = sum("before" not in record for record in _records_by_key(target).values())
    if own:
        raise NotRegraded(f"{target}: has {own} samples that were drawn there, with this grader; move it away to build it "
                          f"from {folder}")


def _records_by_key(folder: Path) -> dict[SampleKey, Record]:
    return {key_of(record): record for record in read_records(folder, stored.sample_schema())}


def _write(regraded: Regraded, identity: dict[str, object], sessions: list[dict], configured: dict, config: Config) -> None:
    """Writes the files of the new run.

    Each file is replaced atomically: if the process is killed, the target has either all new records or its old records.
    Records of the target that the source does not have are kept.
    """
    folder, target, records = regraded
    about = {"from": folder.name, "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
             "packages": {package: importlib.metadata.version(package) for package in _PACKAGES}}
    sessions = [*sessions[:-1], {**sessions[-1], "regraded": about}]
    target.mkdir(exist_ok=True)
    with closed(target):
        # The target's records of samples that the source does not have
        _refuse_own_samples(target, folder)
        present, new = _records_by_key(target), {key_of(record): record for record in records}
        others = sum(key in new and record["text"] != new[key]["text"] for key, record in present.items())
        if others:
            raise UserError(f"{target}: has {others} samples with other texts than those of {folder}; move it away to build "
                            "it from there")
        kept = [record for key, record in present.items() if key not in new]
        records = [*records, *kept]
        if kept:
            sessions = [*stored.described(target / RUN).sessions, *sessions]
        files: dict[str, str | bytes] = {
            "config.yaml": as_yaml({**configured, "grader": plain(config)["grader"]}),
            "run.json": json.dumps({"identity": identity, "sessions": sessions}, indent=1) + "\n",
            RECORDS: b"".join(stored.record_line(record, hash_of(identity)) for record in records),
        }
        if problems := stored.read_problems(target) | stored.read_problems(folder):
            files[PROBLEMS] = stored.as_lines(problems.values())
        summarised = [run / "summary.json" for run in (folder, target) if is_there(run / "summary.json")]
        if summarised:
            condition = stored.json_object(summarised[0]).get("condition", folder.name)
            aggregates = configured.get("aggregate") or []
            summary = summary_of(condition, records, [aggregates] if isinstance(aggregates, str) else aggregates,
                                 Vote.of(configured.get("vote") or {}), configured.get("num_chains") or 1)
            files["summary.json"] = json.dumps(summary, indent=1) + "\n"
        for name, content in files.items():
            write_atomically(target / name, content)


def report(regraded: Regraded) -> str:
    """The changes: accuracy, a table of old and new verdicts, and the changed samples."""
    records = regraded.records
    before: list[Record] = [{**record, "verdict": record["before"]["verdict"]} for record in records]
    changed = [record for record in records if record["verdict"] != record["before"]["verdict"]]
    old, new = (percent(*accuracy(graded)[:3]) for graded in (before, records))
    counts = Counter((record["before"]["verdict"], record["verdict"]) for record in records)
    recorded, verdicts = (sorted({pair[side] for pair in counts}) for side in (0, 1))
    cells = [[name, *(counts[name, other] or "" for other in verdicts), sum(counts[name, other] for other in verdicts)]
             for name in recorded]
    totals = ["all", *(sum(counts[name, other] for name in recorded) for other in verdicts), len(records)]
    lines = [str(regraded.folder), "", f"accuracy {old} -> {new} of {len(records)} samples; {len(changed)} verdicts changed",
             "", tabulate([*cells, totals], headers=["recorded / now", *verdicts, "all"], tablefmt="github",
                          colalign=("left", *["right"] * (len(verdicts) + 1)))]
    strings = [record["same_string"] for record in records if record["same_string"] is not None]
    if strings:
        lines += ["", f"for comparison, by the string rule of published numbers: {100 * sum(strings) / len(records):.1f} %"]
    if changed:
        shown = changed[:_SHOWN]
        samples = [[_short(record["problem"]), record["chain"], _short(record["gold"]), _short(record["answer"]),
                  f"{record['before']['verdict']} -> {record['verdict']}", record["rule"]] for record in shown]
        headers = ["problem", "chain", "gold", "answer", "verdict", "rule"]
        lines += ["", tabulate(samples, headers=headers, tablefmt="github", disable_numparse=True)]
    if len(changed) > _SHOWN:
        lines += [f"... and {len(changed) - _SHOWN} more"]
    return "\n".join([*lines, "", ("the run has this grader, settings and version: nothing was written"
                                   if regraded.target == regraded.folder else f"written: {regraded.target}")])


def _short(text: object) -> str:
    shown = printable(" ".join(str(text).split()))
    return shown if len(shown) <= _WIDTH else shown[:_WIDTH - 3] + "..."


def grader_config(overrides: Sequence[str], own: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """A configuration with the grader of the overrides. Raises UserError for an override of another group.

    Args:
        own: a run's grader, as its `config.yaml` has it. Its identity counts unless the overrides choose a grader; whether
            programs may run here does not.
    """
    given = [text.lstrip("+~").partition("=")[::2] for text in overrides]
    for name, value in given:
        if name.partition(".")[0] != "grader":
            raise ConfigError(name, value, "grader=... and its fields, such as grader.timeout_seconds=8")
    own = {} if "grader" in dict(given) else own
    config, _ = compose_once("config", [*([f"grader={own['name']}"] if "name" in own else []), *overrides], Config)
    for name, spec in specs_of(type(config.grader)).items():
        if spec.role == "identity" and name in own and f"grader.{name}" not in dict(given):
            setattr(config.grader, name, own[name])
    check_bounds(config.grader, "grader.")
    config.grader.check(config)
    config.grader = config.grader.resolved(config)
    config.grader.preflight()
    return config


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    parser = program.OneLineParser("python -m dflash_mcmc.regrade",
                            description="Grades recorded texts again and shows the changes.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run or of an experiment, or glob; and overrides "
                        "of the grader: grader=math grader.timeout_seconds=8")
    options = parser.parse_args(arguments)
    overrides = [text for text in options.runs if "=" in text and not Path(text).exists()]
    runs = run_folders([text for text in options.runs if text not in overrides])
    pools: dict[int, GradingPool] = {}
    with ExitStack() as stack:
        for number, ((folder, named), config) in enumerate(zip(runs, _graders(runs, overrides), strict=True)):
            if id(config) not in pools:
                pools[id(config)] = stack.enter_context(closing(config.grader.start()))
            try:
                text = report(regrade(folder, config, pools[id(config)]))
            except NotRegraded as error:  # a run without texts is an error only if the command names it
                if named:
                    raise
                text = f"left out: {error}"
            print(f"\n\n{text}" if number else text, end="", flush=True)
    print()


def _graders(runs: Sequence[Found], overrides: Sequence[str]) -> list[Config]:
    """The configuration of each run's grader. Runs of the same grader share one."""
    own = [configuration_of(folder).get("grader") or {} for folder, _ in runs]
    graders: dict[str, Any] = {name: each.cls for name, each in registered("grader").items()}
    fields = {each["name"]: specs_of(graders[each["name"]]) for each in own if each.get("name") in graders}

    names = {text: text.lstrip("+~").partition("=")[0].removeprefix("grader.") for text in overrides}

    def of(grader: Mapping[str, Any]) -> list[str]:  # without fields that other runs' graders have, and this one has not
        others = {name for known in fields.values() for name in known} - set(fields.get(grader.get("name", ""), ()))
        return [text for text in overrides if names[text] not in others or not grader or "grader" in names.values()]

    made = {repr(each): grader_config(of(each), each) for each in {repr(each): each for each in own}.values()}
    return [made[repr(each)] for each in own]


if __name__ == "__main__":
    main()
