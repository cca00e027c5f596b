"""A run: tasks are claimed, done, recorded and tracked by one loop, and then summarised."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.runner.tasks import Tasks


def tasks_of(config: Config, prompts: Mapping[str, np.ndarray] = MappingProxyType({})) -> Tasks:
    """The tasks of a configuration: the units of its probe, or samples if it has none.

    Args:
        prompts: token ids of prompts that are encoded already, by the ids of their problems.
    """
    if not config.probe.is_null:
        from dflash_mcmc.runner.units import Units

        return Units(config, prompts)
    from dflash_mcmc.runner.samples import Samples

    return Samples(config, prompts)
