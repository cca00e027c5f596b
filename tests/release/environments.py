"""Virtual environments of a release check: the oldest allowed versions of the packages, or the newest, for each Python."""

import hashlib
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from tests.processes import ROOT

EXTRAS = ("real", "serve", "slurm")
"""Extras that the environments have. The others need packages of several GB, or an account."""

FOR_TESTS = ("hypothesis", "openai", "pytest", "pyyaml", "statsmodels")
"""Packages of the extra `dev` that the tests need."""


class Environment(NamedTuple):
    """A virtual environment to be made."""

    name: str
    python: str
    """The interpreter that makes it."""
    constraints: tuple[str, ...]
    """Lines of a constraints file of pip."""


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def stated() -> list[Requirement]:
    """The requirements of the package, of the extras here and of the tests."""
    optional = project()["optional-dependencies"]
    dev = [text for text in optional["dev"] if Requirement(text).name in FOR_TESTS]
    extras = [text for extra in EXTRAS for text in optional[extra]]
    return [Requirement(text) for text in [*project()["dependencies"], *extras, *dev]]


def lower_bounds(requirements: Iterable[Requirement]) -> tuple[str, ...]:
    """A constraint for each requirement: its lower bound, exactly. Raises ValueError for one without a lower bound."""
    lines = set()
    for requirement in requirements:
        bounds = [part.version for part in requirement.specifier if part.operator == ">="]
        if len(bounds) != 1:
            raise ValueError(f"pyproject.toml: {requirement}; allowed: one lower bound, {requirement.name}>=VERSION")
        lines.add(f"{requirement.name}=={bounds[0]}")
    return tuple(sorted(lines))


def pythons() -> dict[str, str]:
    """The interpreters here that the package allows, by `major.minor`, oldest first."""
    allowed = Requirement(f"python{project()['requires-python']}").specifier
    found = {}
    for minor in range(8, 30):
        for candidate in _candidates(f"3.{minor}"):
            code = "import sys, ensurepip; print('.'.join(map(str, sys.version_info[:3])))"
            asked = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
            if asked.returncode == 0 and Version(asked.stdout.strip()) in allowed:
                found[f"3.{minor}"] = candidate
                break
    return found


def planned() -> list[Environment]:
    """The oldest versions on the oldest Python, and the newest versions on each Python."""
    here = pythons()
    oldest = next(iter(here))
    return [Environment(f"oldest-{oldest}", here[oldest], lower_bounds(stated())),
            *(Environment(f"newest-{name}", python, ()) for name, python in here.items())]


def make(environment: Environment, folder: Path, wheel: Path) -> Path:
    """Makes the environment with the wheel and what the tests need, or puts this wheel into the one that is there.

    Returns its interpreter. Raises subprocess.CalledProcessError.
    """
    place, constraints = folder / environment.name, folder / f"{environment.name}.txt"
    python, ready = place / "bin/python", place / ".ready"
    digest = hashlib.blake2b("\n".join([*environment.constraints, *map(str, stated())]).encode()).hexdigest()
    if not (ready.exists() and ready.read_text() == digest):
        subprocess.run([environment.python, "-m", "venv", "--clear", str(place)], check=True)
        constraints.write_text("".join(f"{line}\n" for line in environment.constraints))
        tests = [str(requirement) for requirement in stated() if requirement.name in FOR_TESTS]
        pip(python, "--constraint", str(constraints), f"{wheel}[{','.join(EXTRAS)}]", *tests)
        ready.write_text(digest)
    pip(python, "--no-deps", "--force-reinstall", str(wheel))
    return python


def make_builder(folder: Path) -> Path:
    """An environment with `build`. Returns its interpreter. Raises subprocess.CalledProcessError."""
    python = folder / "builder/bin/python"
    if not python.exists():
        subprocess.run([next(iter(pythons().values())), "-m", "venv", str(folder / "builder")], check=True)
    pip(python, "build")
    return python


def pip(python: Path, *arguments: str) -> None:
    """`pip install` in the environment of this interpreter. Raises subprocess.CalledProcessError."""
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *arguments], check=True, cwd=python.parent)


def _candidates(version: str) -> Iterator[str]:
    """Interpreters of this version: on the path, and those that pyenv has."""
    if (on_path := shutil.which(f"python{version}")) is not None:
        yield on_path
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(root.glob(f"versions/{version}.*/bin/python")))
