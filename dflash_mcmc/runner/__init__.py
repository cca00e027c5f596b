"""A run: tasks are claimed, done, recorded and tracked by one loop, and then summarised."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.runner.tasks import Tasks


def tasks_of(config: Config) -> Tasks:
    """The tasks of a configuration: the units of its probe, or samples if it has none."""
    if not config.probe.is_null:
        from dflash_mcmc.runner.units import Units

        return Units(config)
    from dflash_mcmc.runner.samples import Samples

    return Samples(config)
