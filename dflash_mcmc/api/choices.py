"""Components that a Python program chooses: by the name of an option, or as objects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_mcmc.config.command import compose_once
from dflash_mcmc.config.help import option_files
from dflash_mcmc.config.overrides import quoted
from dflash_mcmc.config.schema import Config
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean
from dflash_mcmc.fields import check_bounds
from dflash_mcmc.registry import GROUPS, components

_ARGUMENTS = {"dataset.max_new_tokens": "max_new_tokens", "dataset.stop": "stop", "model.path": "model", "model.chat": "chat"}


@contextmanager
def named_by_argument() -> Iterator[None]:
    """A context in which errors name the arguments of the Python interface in place of the fields that they set."""
    try:
        yield
    except UserError as error:
        error.args = (re.sub("|".join(map(re.escape, _ARGUMENTS)), lambda found: _ARGUMENTS[found[0]], str(error)),)
        raise


def component(group: str, name: str, **fields: Any) -> Any:
    """The component of an option, with what `conf/<group>/<name>.yaml` changes in its defaults, and with the given fields.

    An option that has the name of its component gives what the class's constructor gives: `component("sampler", "power_mh")`
    equals `dflash_mcmc.PowerMH()`. Other options are presets of a component, such as `component("model", "tiny")`.

    Args:
        group: a group of components, such as "sampler", "blend", "decoder", "draft" or "model".
        name: an option of the group: `python -m dflash_mcmc.catalogue` lists them.
        fields: values of fields; `python -m dflash_mcmc.catalogue GROUP` lists them.

    Raises:
        UserError: for an unknown option or field, or a value out of bounds, with the message of the command line.
    """
    if group not in GROUPS:
        raise UserError(f"unknown group {group!r}{did_you_mean(group, GROUPS)}; allowed: {', '.join(GROUPS)}")
    given = [override(f"{group}.{field}", value) for field, value in fields.items()]
    return getattr(compose_once("config", [f"{group}={name}", *given], Config)[0], group)


def configuration(chosen: Mapping[str, Any], values: Mapping[str, Any]) -> Config:
    """The configuration with the chosen components, which is not checked as a whole yet. Raises UserError.

    Args:
        chosen: by group, an object, the name of an option, or None for the option in `conf/config.yaml`. A sampler may be the
            name of a condition, which is a sampler and a blend.
        values: values of fields by dotted name.
    """
    conditions = option_files()["condition"].keys() - components("sampler").keys()
    named = [override("condition" if group == "sampler" and choice in conditions else group, choice)
             for group, choice in chosen.items() if isinstance(choice, str)]
    overrides = ["tracker=none", *named, *(override(field, value) for field, value in values.items())]
    config, _ = compose_once("config", overrides, Config)
    for group, choice in chosen.items():
        if choice is not None and not isinstance(choice, str):
            if not is_component(group, choice):
                raise ConfigError(group, choice, f"a component of the group, or one of {', '.join(components(group))}")
            check_bounds(choice, f"{group}.")  # its fields may have been set after it was made
            setattr(config, group, choice)
    return config


def is_component(group: str, value: object) -> bool:
    """Whether a value is a component of the group."""
    return any(type(value) is known.cls for known in components(group).values())


def override(field: str, value: Any) -> str:
    """A value as the command line writes it."""
    return f"{field}={_written(value)}"


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_written(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, (str, Path)):
        return quoted(str(value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
