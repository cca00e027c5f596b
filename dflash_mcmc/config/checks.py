"""The checks of a run's configuration as a whole. Nothing here touches a model."""

from __future__ import annotations

import json
import re

from omegaconf import DictConfig

from dflash_mcmc.config.schema import OF_THE_MACHINE, Config, component_of, to_typed
from dflash_mcmc.errors import ConfigError, note
from dflash_mcmc.registry import components, name_of, options_with
from dflash_mcmc.settings import groups_of
from dflash_mcmc.statistics.summaries import NAMES
from dflash_mcmc.statistics.votes import PROGRAM_RULES, VOTES


def to_config(composed: DictConfig) -> Config:
    """The typed configuration of a run, checked as a whole. Raises UserError."""
    return checked(to_typed(composed, Config))


def checked(config: Config) -> Config:
    """The same object after the checks that span fields. Its components are resolved, and a draft without use is left out.

    Raises UserError.
    """
    # The names are of folders, and the components of a condition are the chosen ones.
    for field, name in (("name", config.name), ("condition.name", config.condition.name or "x")):
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ConfigError(field, name, "letters, digits, . _ - (it is the name of a folder)")
    for group in ("sampler", "blend"):
        stands_for, chosen = getattr(config.condition, group), name_of(component_of(config, group))
        if stands_for is not None and stands_for != chosen:
            raise ConfigError(group, chosen, f"{stands_for!r}, the value of condition={config.condition.name}; or no "
                              "condition")
    _check_draft(config)
    _check_aggregate(config)
    used = tuple(dict.fromkeys((*groups_of(config), *OF_THE_MACHINE)))
    # A check reads other components as they were given, so that none is resolved before all are checked.
    for group in used:
        _check_needs(config, group)
        component_of(config, group).check(config)
    for group in used:
        setattr(config, group, component_of(config, group).resolved(config))
    return config


def _check_needs(config: Config, group: str) -> None:
    """Checks what a component has declared in `needs`. Raises ConfigError for the first value that it does not work with."""
    component = component_of(config, group)
    for need in component.needs:
        field, _, value = need.given.partition("=")
        if field and (getattr(component, field) is None or (value and getattr(component, field) != value)):
            continue
        user = f"{group}.{need.given}" if field else f"{group}={name_of(component)}"
        other, _, attribute = need.of.partition(".")
        part = getattr(config, other)
        if (found := getattr(part, attribute)) == need.value:
            continue
        if attribute in part.__dataclass_fields__:
            allowed = repr(need.value) if isinstance(need.value, str) else json.dumps(need.value)
            raise ConfigError(need.of, found, f"{allowed} with {user}{need.why}")
        raise ConfigError(other, name_of(part), f"{options_with(other, attribute)} with {user}{need.why}")


def _check_draft(config: Config) -> None:
    """Checks that a needed draft is configured, and leaves out one that nothing uses, with a note. Raises ConfigError."""
    used = groups_of(config)
    users = [group for group in used if component_of(config, group).needs_draft]
    takers = [group for group in used if component_of(config, group).takes_draft]
    draft = name_of(config.draft)
    if users and config.draft.is_null:
        config.engine.check(config)  # an engine without drafts says so, before a draft is asked for
        chosen = " and ".join(f"{group}={name_of(component_of(config, group))}" for group in users)
        raise ConfigError("draft", draft, f"a draft, such as tiny (the embedded model's) or dflash, with {chosen}")
    if not users and not takers and not config.draft.is_null:
        # The chosen options are not in the note, so that a sweep over conditions prints it once.
        could = " or ".join(group for group in ("blend", "sampler", "decoder", "probe") if group in used)
        note(f"draft={draft} is left out where no {could} uses it")
        config.draft = next(option for option in components("draft").values() if option.cls.is_null).cls()


def _check_aggregate(config: Config) -> None:
    """Checks `aggregate` against the chains, the grader and the sampler, and the rules' parameters. Raises ConfigError."""
    names = config.aggregates()
    if config.aggregate is not None and (not names or not all(name in NAMES for name in names) or len({*names}) < len(names)):
        words = ", ".join(map(repr, NAMES))
        raise ConfigError("aggregate", config.aggregate, f"one of {words}, a list of several ([majority,power]), or null")
    if names and config.num_chains < 2:
        raise ConfigError("aggregate", config.aggregate, f"null, or num_chains of 2 and more (given {config.num_chains})")
    if {*names} & {*VOTES} and (config.grader.runs_answers or config.grader.judges):
        what = "programs" if config.grader.runs_answers else "judged texts"
        others = f", {', '.join(PROGRAM_RULES)}" if config.grader.examples else ""
        raise ConfigError("aggregate", config.aggregate, f"null or log_p{others} with grader={name_of(config.grader)}: {what} "
                          "have no answers that can be compared as texts")
    if {*names} & {*PROGRAM_RULES} and not config.grader.examples:
        raise ConfigError("aggregate", config.aggregate, "another name without grader=code grader.examples=true, which runs "
                          "programs on the examples of their questions")
    for name in names:
        if name not in config.vote.rules or not config.vote.rules[name].needs_log_q:
            continue  # the others weigh no chain by its log q
        law, rules = config.sampler.law(), config.vote.rules
        allowed = ", ".join(other for other in NAMES if other not in rules or not rules[other].needs_log_q)
        if not config.sampler.draws_once:
            raise ConfigError("aggregate", name,
                              f"{allowed} with sampler={name_of(config.sampler)}: {name} needs independent draws with a "
                              f"known log q, as of sampler={options_with('sampler', 'draws_once')}")
        if law.truncates:
            law_in_words = f"sampler.top_k={law.top_k}, top_p={law.top_p:g}, min_p={law.min_p:g}"
            raise ConfigError("aggregate", name, f"{allowed} with {law_in_words}: {name} needs draws without truncation "
                              "(top_k=0, top_p=1, min_p=0)")
