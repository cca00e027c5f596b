"""A worker in a grid's job draws one point, or the job's share of it: `python -m dflash_mcmc.grid.work GRID POINT`.

The exit codes are the same as for `python -m dflash_mcmc`. 0 also means that other workers draw the samples that are left.
"""

import os
import sys
from pathlib import Path

from dflash_mcmc.config.command import prepare
from dflash_mcmc.config.schema import Job
from dflash_mcmc.grid import snapshot
from dflash_mcmc.grid.folder import Grid
from dflash_mcmc.grid.supervise import ENDINGS
from dflash_mcmc.process import ranks
from dflash_mcmc.process.program import STOPPED, USER_ERROR, guarded
from dflash_mcmc.process.worker import die_with_parent


def main(arguments: list[str]) -> None:
    """Runs the point and exits."""
    die_with_parent()  # the parent may be the launcher of several processes
    code = guarded(lambda: _work(Path(arguments[0]), int(arguments[1])))
    if ranks.world_size() > 1 and code in (0, USER_ERROR, STOPPED):
        with Path(os.environ[ENDINGS]).open("a") as endings:
            endings.write(f"{code}\n")
        code = 0  # another exit code would make the launcher end the other processes
    sys.exit(code)


def _work(folder: Path, number: int) -> None:
    from dflash_mcmc.runner.loop import execute

    prepare()
    grid = Grid.read(folder)
    point = grid.points[number]
    config = snapshot.read_point(grid.point_file(number))
    snapshot.check_identity(config, point.digest)
    result = execute(Job(config, tuple(point.overrides), point.choices))
    if not ranks.rank():
        print(f"{result.folder}: {result.num_new} new")


if __name__ == "__main__":
    main(sys.argv[1:])
