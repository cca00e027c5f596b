"""In a job: one point of a grid, or this job's part of it. `python -m dflash_mcmc.grid.work GRID POINT`; jobs start it.

Exit codes as of `python -m dflash_mcmc`; 0 also where samples are left that others draw.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from dflash_mcmc.config import command
from dflash_mcmc.grid import snapshot
from dflash_mcmc.grid.folder import Grid, Point
from dflash_mcmc.grid.supervise import ENDINGS, die_with_parent
from dflash_mcmc.process import ranks
from dflash_mcmc.process.program import STOPPED, USER_ERROR, guarded


def main(arguments: list[str]) -> None:
    """Runs the point and exits."""
    die_with_parent()  # that of a launch, too
    code = guarded(lambda: _work(Path(arguments[0]), int(arguments[1])))
    if ranks.world_size() > 1 and code in (0, USER_ERROR, STOPPED):
        with Path(os.environ[ENDINGS]).open("a") as endings:
            endings.write(f"{code}\n")
        code = 0  # the launcher would end the others
    sys.exit(code)


def _work(folder: Path, number: int) -> None:
    command.prepare()
    grid = Grid.read(folder)
    point = grid.points[number]
    config = snapshot.read_point(grid.point_file(number))
    snapshot.check_identity(config, point.digest)
    _remember(point)
    if not config.probe.is_null:
        from dflash_mcmc.run.probing import execute
    else:
        from dflash_mcmc.run.samples import execute
    result = execute(config)
    if not ranks.rank():
        print(f"{result.folder}: {result.num_new} new")


def _remember(point: Point) -> None:
    """Names a run as its command would: trackers show what the command line set."""
    hydra = OmegaConf.create({"hydra": OmegaConf.structured(HydraConf)})
    hydra.hydra.overrides.task = point.overrides
    hydra.hydra.runtime.choices = point.choices
    HydraConfig.instance().set_config(hydra)


if __name__ == "__main__":
    main(sys.argv[1:])
