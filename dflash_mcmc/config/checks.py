"""The checks of a run's configuration as a whole. Nothing here touches a model."""

from __future__ import annotations

import re

from omegaconf import DictConfig

from dflash_mcmc.config import aggregate, budget
from dflash_mcmc.config.schema import OF_THE_MACHINE, Config, component_of, groups_of, to_typed
from dflash_mcmc.errors import ConfigError, note
from dflash_mcmc.registry import components, name_of


def to_config(composed: DictConfig) -> Config:
    """The typed configuration of a run, checked as a whole. Raises UserError."""
    return checked(to_typed(composed, Config))


def checked(config: Config) -> Config:
    """The same configuration after the checks that span fields, with resolved components. Raises UserError."""
    _check_condition(config)
    config.probe = config.probe.with_draft(config.draft)
    _check_draft(config)
    aggregate.check(config)
    budget.check(config)
    used = tuple(dict.fromkeys((*groups_of(config), *OF_THE_MACHINE)))
    for group in used:
        component_of(config, group).check(config)
    for group in used:
        setattr(config, group, component_of(config, group).resolved(config))
    return config


def _check_condition(config: Config) -> None:
    for field, name in (("name", config.name), ("condition.name", config.condition.name or "x")):
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ConfigError(field, name, "letters, digits, . _ - (it is the name of a folder)")
    for group in ("sampler", "blend"):
        stands_for, chosen = getattr(config.condition, group), name_of(component_of(config, group))
        if stands_for is not None and stands_for != chosen:
            raise ConfigError(group, chosen, f"{stands_for!r}, the value of condition={config.condition.name}; or no "
                              "condition")


def _check_draft(config: Config) -> None:
    """Checks that a needed draft is configured. A draft that nothing uses is left out with a note: sweeps have such points.

    Raises ConfigError.
    """
    used = groups_of(config)
    users = [group for group in used if component_of(config, group).needs_draft]
    takers = [group for group in used if component_of(config, group).takes_draft]
    draft = name_of(config.draft)
    if users and config.draft.is_null:
        chosen = " and ".join(f"{group}={name_of(component_of(config, group))}" for group in users)
        raise ConfigError("draft", draft, f"a draft, such as tiny (the embedded model's) or dflash, with {chosen}")
    if not users and not takers and not config.draft.is_null:
        # The chosen options are not in the note, so that a sweep over conditions prints it once.
        could = " or ".join(group for group in ("blend", "sampler", "decoder", "probe") if group in used)
        note(f"draft={draft} is left out where no {could} uses it")
        config.draft = next(found for found in components("draft").values() if found.cls.is_null).cls()
