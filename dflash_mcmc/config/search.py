"""A search, such as sweep=optuna: Hydra's sweeper chooses the points; each of them is composed and run like any other job."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import cast

from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from dflash_mcmc.config.command import Command, composer
from dflash_mcmc.config.compose import Composer
from dflash_mcmc.config.jobs import Job
from dflash_mcmc.config.overrides import text_of
from dflash_mcmc.config.points import job_of
from dflash_mcmc.registry import GROUPS


def search(command: Command, run: Callable[[Sequence[str], Callable[[], Job]], float | None]) -> None:
    """Lets Hydra's sweeper choose the points of a command, and calls `run` for each of them.

    Args:
        run: takes a point's overrides and the function that composes its job, and returns the objective. The sweeper
            counts an exception as a failed trial.
    """
    with composer("config", command.overrides) as composing:
        overrides = [composing.parse(text) for text in command.overrides]
        of_hydra = [text_of(override) for override in overrides if override.is_hydra_override()]
        master = _master(composing, command)
        trials = _Trials(master)
        sweeper = Plugins.instance().instantiate_sweeper(
            config=master, hydra_context=HydraContext(config_loader=cast(ConfigLoader, trials), callbacks=Callbacks()),
            task_function=lambda _: run(trials.point, lambda: job_of(composing, [*of_hydra, *trials.point], command.optional)))
        sweeper.sweep([text for text in command.overrides if text not in of_hydra])


class _Trials:
    """The loader that gives Hydra's launcher the configuration of each trial. It notes the overrides and composes nothing.

    The launcher calls no other method of a ConfigLoader.
    """

    def __init__(self, master: DictConfig):
        self._master = master
        self.point: list[str] = []
        """The overrides of the trial that runs."""

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """The configuration that Hydra runs a trial with: Hydra's settings, and the overrides that name the trial."""
        self.point = list(sweep_overrides)
        of_trial = copy.deepcopy(self._master)
        of_trial.hydra.overrides.task = self.point
        return of_trial


def _master(composing: Composer, command: Command) -> DictConfig:
    """The configuration that the sweeper itself reads: Hydra's node, and the root fields that name the sweep's folder."""
    single = [text for text in command.overrides if not composing.parse(text).is_sweep_override()]
    master = composing.with_hydra(single)
    for name, value in composing.compose([text for text in single if not _is_of_component(composing, text)]).values.items():
        if name not in GROUPS:
            OmegaConf.update(master, str(name), value)
    master.hydra.mode = RunMode.MULTIRUN
    return master


def _is_of_component(composing: Composer, text: str) -> bool:
    """Whether an override sets a field of a component. Such a field may not exist while its group is swept."""
    group, dot, _ = composing.parse(text).key_or_group.partition(".")
    return bool(dot) and group in GROUPS
