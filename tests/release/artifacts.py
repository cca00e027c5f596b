"""The wheel and the source distribution: how they are made, and what they must hold."""

import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import yaml

from tests.processes import ROOT

GENERATED = {"PKG-INFO"}
"""Files of a source distribution that are not under version control."""


def version() -> str:
    """The version that the package states."""
    (found,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "dflash_mcmc/__init__.py").read_text(), flags=re.MULTILINE)
    return str(found)


def tracked() -> set[str]:
    """Files of the checkout: under version control, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name for name in listed if (ROOT / name).is_file()}


def expected_in_wheel(files: set[str]) -> set[str]:
    """Names in the wheel, for these files of the checkout: the package, and `conf/` inside it."""
    package = {name for name in files if name.startswith("dflash_mcmc/")}
    return package | {f"dflash_mcmc/{name}" for name in files if name.startswith("conf/")}


def faults_of_wheel(wheel: Path, files: set[str]) -> list[str]:
    """What is wrong with the content of a wheel, a line each."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = {Path(name).name: archive.read(name).decode() for name in names if ".dist-info/" in name}
    own = {name for name in names if ".dist-info/" not in name}
    faults = _difference("wheel", own, expected_in_wheel(files))
    if "dflash_mcmc/py.typed" not in own:
        faults.append("wheel: py.typed is missing")
    if metadata.get("LICENSE") != (ROOT / "LICENSE").read_text():
        faults.append("wheel: the licence is missing, or another")
    if "dflash-mcmc" not in metadata.get("entry_points.txt", ""):
        faults.append("wheel: the command dflash-mcmc is missing")
    if f"\nVersion: {version()}\n" not in metadata.get("METADATA", ""):
        faults.append(f"wheel: the version is not {version()}")
    return faults


def faults_of_source(source: Path, files: set[str]) -> list[str]:
    """What is wrong with the content of a source distribution, a line each."""
    with tarfile.open(source) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    return _difference("source", names - GENERATED, files)


def faults_of_version() -> list[str]:
    """Places that state another version than the package, a line each."""
    faults = []
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    if cited != version():
        faults.append(f"CITATION.cff: version {cited}; allowed: {version()}")
    newest = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    heading = newest.group(1) if newest else "nothing"
    if heading.split()[0] != version():
        faults.append(f"CHANGELOG.md: the first section is {heading}; allowed: {version()}")
    return faults


def build(python: Path, folder: Path) -> tuple[Path, Path]:
    """Makes the wheel, through the source distribution, with the `build` of this Python. Returns wheel and source.

    Raises subprocess.CalledProcessError.
    """
    subprocess.run([str(python), "-m", "build", "--outdir", str(folder), str(ROOT)], check=True, stdout=subprocess.DEVNULL)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def _difference(name: str, found: set[str], wanted: set[str]) -> list[str]:
    return [*(f"{name}: {file} is missing" for file in sorted(wanted - found)),
            *(f"{name}: {file} does not belong there" for file in sorted(found - wanted))]
