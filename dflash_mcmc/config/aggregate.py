"""The checks of `aggregate`: how one answer per problem is made from several chains."""

from __future__ import annotations

from dflash_mcmc.config.schema import Config
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.registry import name_of, options_with
from dflash_mcmc.statistics.rules import VOTES
from dflash_mcmc.statistics.summaries import NAMES


def check(config: Config) -> None:
    """Checks the names in `aggregate` against the chains, the grader and the sampler, and the rules' parameters.

    Raises ConfigError.
    """
    names = config.aggregates()
    known = all(name in NAMES for name in names)
    if config.aggregate is not None and (not names or not known or len({*names}) < len(names)):
        words = ", ".join(map(repr, NAMES))
        raise ConfigError("aggregate", config.aggregate, f"one of {words}, a list of several ([majority,power]), or null")
    if names and config.num_chains < 2:
        raise ConfigError("aggregate", config.aggregate, f"null, or num_chains of 2 and more (given {config.num_chains})")
    if {*names} & {*VOTES} and (config.grader.runs_answers or config.grader.judges):
        what = "programs" if config.grader.runs_answers else "judged texts"
        raise ConfigError("aggregate", config.aggregate,
                          f"null or log_p with grader={name_of(config.grader)}: a vote over {what} is not defined")
    config.vote.softsat.check()
    for name in names:
        if name in config.vote.rules and config.vote.rules[name].needs_log_q:
            _check_weights(config, name)


def _check_weights(config: Config, name: str) -> None:
    """Checks that the chains have importance weights for this rule. Raises ConfigError."""
    law, rules = config.sampler.law(), config.vote.rules
    allowed = ", ".join(other for other in NAMES if other not in rules or not rules[other].needs_log_q)
    if not config.sampler.draws_once:
        raise ConfigError("aggregate", name, f"{allowed} with sampler={name_of(config.sampler)}: {name} needs independent "
                          f"draws with a known log q, as of sampler={options_with('sampler', 'draws_once')}")
    if law.truncates:
        given = f"sampler.top_k={law.top_k}, top_p={law.top_p:g}, min_p={law.min_p:g}"
        raise ConfigError("aggregate", name, f"{allowed} with {given}: {name} needs draws without truncation "
                          "(top_k=0, top_p=1, min_p=0)")
