"""Grading a run again: its texts by another grader, as a run of its own beside it. Nothing is drawn.

The new run has the identity that the same samples have under the new grader, so that it lies where a start with that grader
looks for it, and goes on from there. The old run stays as it is; each new record has the old grade in `before`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading import label
from dflash_mcmc.grading.verdicts import NOT_DRAWN
from dflash_mcmc.types import Grade

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.grading.choice.pool import LetterPool
    from dflash_mcmc.grading.code.pool import ProgramPool
    from dflash_mcmc.grading.math.pool import MathPool
    from dflash_mcmc.store.records import SampleKey

    Pool = MathPool | ProgramPool | LetterPool

_NEEDED = ("text", "gold", "verdict", "answer")
_PACKAGES = ("math-verify", "latex2sympy2_extended", "sympy")


class NoTexts(UserError):
    """A run has nothing that a grader reads: it is a probe's, or has not begun."""


class Regraded(NamedTuple):
    """A run with its grades given again."""

    folder: Path
    """Of the run that was graded again."""
    target: Path
    """Of the run with the new grades; `folder` where the grader is the same one, and nothing is written."""
    records: list[dict]
    """With the new grades, and the old ones in `before`. The target can have others too, that were graded from another run."""


def regrade(folder: Path, config: Config, pool: Pool) -> Regraded:
    """Grades the records of a run with the configuration's grader, whose pool is running, and writes the new run.

    Raises UserError, RunBusy for a run that is being written. What is killed midway leaves no record behind.
    """
    from dflash_mcmc.store.records import read_records
    from dflash_mcmc.store.sharing import closed

    with closed(folder):
        described, configured = _read(folder / "run.json"), _read(folder / "config.yaml")
        records = read_records(folder)
    lacking = sorted(set(_NEEDED) - set(records[0])) if records else ["records"]
    if lacking:
        raise NoTexts(f"{folder}: cannot be graded again: it has no {', '.join(lacking)}; allowed: a run of samples")
    identity = {name: value for name, value in described["identity"].items() if not _of_grader(name)} | settings(config)
    target = _target(folder, identity)
    _refuse_samples_of_its_own(target, folder)
    found = Regraded(folder, target, _graded(records, pool, label(config.grader)))
    if target != folder:
        _write(found, identity, described["sessions"], configured, config)
    return found


def settings(config: Config) -> dict[str, object]:
    """The part of an identity that is the grader's."""
    from dflash_mcmc.config.identity import settings_of

    return {name: value for name, value in settings_of(config).items() if _of_grader(name)}


def _of_grader(name: str) -> bool:
    return name.partition(".")[0] == "grader"


def _read(path: Path) -> dict:
    from omegaconf import OmegaConf

    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else OmegaConf.to_container(OmegaConf.create(text))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; allowed: the folder of a run") from error
    except Exception as error:  # json, yaml and OmegaConf each have errors of their own
        raise UserError(f"{path}: is not what a run writes: {type(error).__name__}") from error


def _target(folder: Path, identity: dict[str, object]) -> Path:
    """Where a run of this identity lies, beside the other one."""
    from dflash_mcmc.config.identity import hash_of

    return folder.parent / "-".join([*folder.name.split("-")[:-1], hash_of(identity)])


def _refuse_samples_of_its_own(target: Path, folder: Path) -> None:
    if target == folder or not target.is_dir():
        return
    own = sum("before" not in record for record in _recorded(target).values())
    if own:
        raise UserError(f"{target}: has {own} samples that were drawn there, with this grader; move it away to build it from "
                        f"{folder}")


def _recorded(folder: Path) -> dict[SampleKey, dict]:
    from dflash_mcmc.store.records import read_records

    return {(record["problem"], record["chain"]): record for record in read_records(folder)}


def _left_there(found: Regraded) -> list[dict]:
    """The target's records of samples that the source has not, which stay. Raises UserError for those that would be lost.

    With the target locked: while the texts were graded, a run can have drawn into it, or another source been graded into it.
    """
    _refuse_samples_of_its_own(found.target, found.folder)
    there, new = _recorded(found.target), {(record["problem"], record["chain"]): record for record in found.records}
    others = sum(key in new and record["text"] != new[key]["text"] for key, record in there.items())
    if others:
        raise UserError(f"{found.target}: has {others} samples with other texts than those of {found.folder}; move it away to "
                        "build it from there")
    return [record for key, record in there.items() if key not in new]


def _graded(records: Sequence[dict], pool: Pool, name: str) -> list[dict]:
    """The records with new grades; what could not be drawn stays as it is."""
    for number, record in enumerate(records):
        if record["verdict"] != NOT_DRAWN:
            pool.submit(number, record["text"], record["gold"])
    grades = dict(pool.finished(wait=True))
    fields = (*Grade._fields, "grader")
    return [{**record, **(grades[number]._asdict() if number in grades else {}), "grader": name,
             "before": {field: record[field] for field in fields if field in record}} for number, record in enumerate(records)]


def _write(found: Regraded, identity: dict[str, object], sessions: list[dict], configured: dict, config: Config) -> None:
    """The files of the new run. It has all records or none, and without them is a run that has not begun. None is lost."""
    from omegaconf import OmegaConf

    from dflash_mcmc.config.identity import plain
    from dflash_mcmc.statistics import summaries
    from dflash_mcmc.store.files import write_atomically
    from dflash_mcmc.store.records import RECORDS
    from dflash_mcmc.store.sharing import closed

    folder, target, records = found
    about = {"from": folder.name, "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
             "packages": {package: importlib.metadata.version(package) for package in _PACKAGES}}
    sessions = [*sessions[:-1], {**sessions[-1], "regraded": about}]
    target.mkdir(exist_ok=True)
    with closed(target):
        left = _left_there(found)
        records = [*records, *left]
        if left:
            sessions = [*_read(target / "run.json")["sessions"], *sessions]
        files = {
            "config.yaml": OmegaConf.to_yaml(OmegaConf.create({**configured, "grader": plain(config)["grader"]})),
            "run.json": json.dumps({"identity": identity, "sessions": sessions}, indent=1) + "\n",
            RECORDS: "".join(json.dumps(record) + "\n" for record in records),
        }
        summarised = [run / "summary.json" for run in (folder, target) if (run / "summary.json").is_file()]
        if summarised:
            files["summary.json"] = json.dumps(summaries.summarise(_read(summarised[0])["condition"], records), indent=1) + "\n"
        for name, text in files.items():
            write_atomically(target / name, text)
