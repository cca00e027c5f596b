"""A run: tasks are claimed, done, recorded and tracked by one loop, and then summarised.

This package can be called: `dflash_mcmc.run("condition=ps", "dataset.limit=8")` makes a run as
`python -m dflash_mcmc condition=ps dataset.limit=8` does, and returns its folder and its summary (`dflash_mcmc.api.run`).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_mcmc.run.result import RunResult


class _CallablePackage(ModuleType):
    """Python sets the attribute `run` of `dflash_mcmc` to this package when a module of it is imported."""

    def __call__(self, *overrides: str) -> RunResult:
        """See `dflash_mcmc.api.run`."""
        from dflash_mcmc.api import run

        return run(*overrides)


sys.modules[__name__].__class__ = _CallablePackage
