"""Finds the runs of a report from run folders, experiment folders, globs, or W&B run ids."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.errors import UserError
from dflash_mcmc.store.described import RUN, described

_TRACKED = re.compile(r"(?:[^/]+/)*(?:(?P<experiment>[\w-][\w.-]*)-)?(?P<identity>[0-9a-f]{12})")
_ALLOWED = "a run folder, an experiment folder, a glob, or a W&B run id (<experiment>-<identity>)"


class Found(NamedTuple):
    """A run folder."""

    folder: Path
    named: bool
    """Whether the argument names this folder itself, rather than a folder above it or a pattern."""


def run_folders(arguments: Sequence[str | Path], outputs: Path = Path("outputs")) -> list[Found]:
    """The run folders that the arguments name, without duplicates.

    They follow the order of the arguments; runs below one folder are ordered by start time.

    Args:
        outputs: folder of experiments in which W&B run ids are looked up. No network is used.

    Raises a one-line UserError for an argument that matches no run.
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
            raise UserError(f"{argument}: no run folder matches")
        return sorted(runs, key=_start)
    tracked = _TRACKED.fullmatch(argument)
    if tracked is None:
        raise UserError(f"runs: given {argument!r}, which is not a folder; allowed: {_ALLOWED}")
    pattern = f"{glob.escape(tracked['experiment'] or '*') if tracked['experiment'] else '*'}/*{tracked['identity']}"
    runs = [Found(folder, True) for folder in sorted(outputs.glob(pattern)) if (folder / RUN).is_file()]
    if not runs:
        raise UserError(f"{argument}: no run with this identity below {outputs}/; it may be on the machine that ran it")
    return runs


def _of_folder(folder: Path) -> list[Found]:
    runs = _below(folder)
    if not runs:
        raise UserError(f"{folder}: no finished sample here, and no run folder below")
    return sorted(runs, key=_start)


def _below(folder: Path) -> list[Found]:
    """The folder itself if it is a run folder, else all run folders below it."""
    if _is_run(folder, os.listdir(folder)):
        return [Found(folder, True)]
    runs = []
    for parent, folders, files in os.walk(folder):
        if _is_run(Path(parent), files):
            runs.append(Found(Path(parent), False))
            folders.clear()  # do not descend into a run folder
    return runs


def _is_run(folder: Path, files: Sequence[str]) -> bool:
    return RUN in files or any(re.fullmatch(r"records(\.\d+)?\.jsonl", name) for name in files)


def _start(run: Found) -> tuple[str, str]:
    """Sort key: start time, then path. Unreadable files sort first; reading the run reports their errors."""
    try:
        return str(described(run.folder / RUN).sessions[0].get("started", "")), str(run.folder)
    except UserError:
        return "", str(run.folder)
