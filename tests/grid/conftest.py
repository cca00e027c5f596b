"""Stand-ins for the commands of SLURM: they note how they are called and answer what a test has laid down."""

import os
import sys
from pathlib import Path

import pytest

from dflash_mcmc.config import command
from dflash_mcmc.grid.folder import Grid, Point
from tests.conftest import ROOT

_SCRIPT = """#!/bin/bash
here={here}
name=$(basename "$0")
echo "$name $*" >> "$here/calls"
case "$name $1" in
  "scontrol show") name=scontrol-$2;;
  scontrol*) name=scontrol-$1;;
esac
[ -f "$here/$name.error" ] && {{ cat "$here/$name.error" >&2; exit 1; }}
[ -f "$here/$name.answer" ] && cat "$here/$name.answer"
exit 0
"""


class StandIns:
    """The commands on the PATH."""

    def __init__(self, folder: Path):
        self._folder = folder
        for name in ("sbatch", "srun", "sinfo", "squeue", "sacct", "scontrol", "scancel"):
            script = folder / name
            script.write_text(_SCRIPT.format(here=folder))
            script.chmod(0o755)
        self.answer("sinfo", "high\nmain\n")
        self.answer("scontrol-config", "MaxArraySize            = 1001\n")
        self.answer("sbatch", "Submitted batch job 7\n")

    def answer(self, name: str, text: str) -> None:
        """What a command prints."""
        (self._folder / f"{name}.answer").write_text(text)

    def refuse(self, name: str, text: str) -> None:
        """What a command complains of."""
        (self._folder / f"{name}.error").write_text(text)

    def calls(self, name: str) -> list[str]:
        """How it was called."""
        path = self._folder / "calls"
        return [line for line in path.read_text().splitlines() if line.split()[0] == name] if path.is_file() else []


@pytest.fixture
def slurm_commands(tmp_path_factory, monkeypatch) -> StandIns:
    """On a machine that submits to a cluster."""
    folder = tmp_path_factory.mktemp("commands")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return StandIns(folder)


@pytest.fixture
def no_slurm(tmp_path_factory, monkeypatch) -> None:
    """On a machine without SLURM, whatever this one has."""
    folder = tmp_path_factory.mktemp("nothing")
    (folder / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(folder))


@pytest.fixture
def make_grid(tmp_path):
    """A grid with points without jobs; `make_grid("shards=2")` changes fields of the launcher."""
    from dflash_mcmc.config.schema import changed_launcher

    command.prepare()

    def make(*fields: str, points: int = 1) -> Grid:
        launcher = changed_launcher(command.check_command(["-m", "hydra/launcher=slurm"]).launcher, fields)
        labels = [f"seed={number}" for number in range(points)]
        grid = Grid.create(tmp_path, "demo", ["python"], launcher, [
            Point(label=label, overrides=[label], choices={}, digest="0" * 12, folder=str(tmp_path / "demo" / label),
                  num_asked=4)
            for label in labels])
        (grid.folder / "code").symlink_to(ROOT)
        return grid

    return make
