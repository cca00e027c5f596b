"""Loads the model and starts the engine and the thread that serve requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_mcmc.api import online
from dflash_mcmc.serve.app import Service
from dflash_mcmc.serve.metrics import Metrics
from dflash_mcmc.serve.options import ServeOptions, model_name

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config


def built(options: ServeOptions, config: Config) -> Service:
    """The service of a configuration as it was composed. Raises UserError for an engine that cannot be started."""
    metrics = Metrics()
    target, workers, longest_prompt = online.started(config, options.max_prompt_tokens, "serve.max_prompt_tokens",
                                                     options.max_waiting, lambda: metrics.add("engine_failures_total"))
    return Service(options, model_name(options, config), config, target, workers, metrics, longest_prompt)
