"""Which runs a report is of: folders of runs, folders of experiments, globs, or the ids that runs have in W&B."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.errors import UserError

RUN = "run.json"
_TRACKED = re.compile(r"(?:[^/]+/)*(?:(?P<experiment>[\w-][\w.-]*)-)?(?P<identity>[0-9a-f]{12})")
_ALLOWED = "a folder of a run or of an experiment, a glob, or the id of a run in W&B (<experiment>-<identity>)"


class Found(NamedTuple):
    """A run folder."""

    folder: Path
    named: bool
    """Whether it was asked for itself, not found below another folder or by a pattern."""


def run_folders(arguments: Sequence[str | Path], outputs: Path = Path("outputs")) -> list[Found]:
    """The run folders that the arguments stand for, each once, in the order of the arguments; below one folder by their start.

    Args:
        outputs: folder that holds experiments; where the id of a run in W&B is looked up. Nobody is asked over a network.

    Raises UserError, of one line, for an argument without a run.
    """
    if not arguments:
        raise UserError(f"runs: given nothing; allowed: {_ALLOWED}")
    found: dict[Path, Found] = {}
    for argument in arguments:
        for run in _of_argument(str(argument), outputs):
            found.setdefault(run.folder.resolve(), run)
    return list(found.values())


def _of_argument(argument: str, outputs: Path) -> list[Found]:
    path = Path(argument)
    if path.is_dir():
        return _of_folder(path)
    if glob.has_magic(argument):
        folders = [Path(match) for match in sorted(glob.glob(argument, recursive=True)) if Path(match).is_dir()]
        runs = [run._replace(named=False) for folder in folders for run in _below(folder)]
        if not runs:
            raise UserError(f"{argument}: no folder of a run matches")
        return sorted(runs, key=_start)
    tracked = _TRACKED.fullmatch(argument)
    if tracked is None:
        raise UserError(f"runs: given {argument!r}, which is no folder here; allowed: {_ALLOWED}")
    pattern = f"{glob.escape(tracked['experiment'] or '*') if tracked['experiment'] else '*'}/*{tracked['identity']}"
    runs = [Found(folder, True) for folder in sorted(outputs.glob(pattern)) if (folder / RUN).is_file()]
    if not runs:
        raise UserError(f"{argument}: no run of this identity below {outputs}/; its folder may be on the machine that drew it")
    return runs


def _of_folder(folder: Path) -> list[Found]:
    runs = _below(folder)
    if not runs:
        raise UserError(f"{folder}: no finished sample here, nor a run's folder below it")
    return sorted(runs, key=_start)


def _below(folder: Path) -> list[Found]:
    """The folder itself where it is a run's, else all run folders below it."""
    if _is_run(folder, os.listdir(folder)):
        return [Found(folder, True)]
    runs = []
    for parent, folders, files in os.walk(folder):
        if _is_run(Path(parent), files):
            runs.append(Found(Path(parent), False))
            folders.clear()  # what is in a run's folder is the run's
    return runs


def _is_run(folder: Path, files: Sequence[str]) -> bool:
    return RUN in files or any(re.fullmatch(r"records(\.\d+)?\.jsonl", name) for name in files)


def _start(run: Found) -> tuple[str, str]:
    """Runs of one sweep stand in the order in which they were started; what cannot be read is told by who reads it."""
    try:
        return json.loads((run.folder / RUN).read_text())["sessions"][0]["started"], str(run.folder)
    except (OSError, ValueError, LookupError, TypeError):
        return "", str(run.folder)
