"""The checks of `budget`: whether a configuration has a setting that a budget can choose."""

from __future__ import annotations

from dflash_mcmc.config.schema import Config
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.registry import name_of

CHAINS = "num_chains"
"""The field that scales the cost of an answer if the answer is a vote of independent draws."""


def check(config: Config) -> None:
    """Checks `budget` against the probe, the aggregate and the rate. Raises ConfigError."""
    if config.budget is None:
        return
    if not config.probe.is_null:
        raise ConfigError("budget", config.budget, f"null with probe={name_of(config.probe)}, which draws no answers to grade")
    field = config.sampler.cost_field()
    if field not in (None, CHAINS) and config.aggregates():
        raise ConfigError("aggregate", config.aggregate, f"null with budget and sampler={name_of(config.sampler)}, whose "
                          "answer is one sample")
    if config.budget_unit == "seconds" and not (config.hardware.tokens_per_second or config.assumed.tokens_per_second):
        raise ConfigError("hardware.tokens_per_second", None, "a number with budget_unit=seconds: the first settings are "
                          "estimated with it")


def path_of(field: str) -> str:
    """The dotted name of a sampler's `cost_field`."""
    return field if field == CHAINS else f"sampler.{field}"
