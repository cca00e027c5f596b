"""The identity of a run: the values that can change an output, their hash and the run folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dflash_mcmc.config.schema import Config, component_of, groups_of, parts_of, unused
from dflash_mcmc.fields import has_spec, identity_values, spec_of, walk
from dflash_mcmc.registry import GROUPS, name_of
from dflash_mcmc.store.described import hash_of

IDENTITY_VERSION = 3
"""Increased when the meaning of a field changes, so that no run continues records with the old meaning."""


def identity_of(config: Config) -> dict[str, object]:
    """The values that can change an output: identity fields, component names, and the content of model, draft and dataset."""
    values, used = settings_of(config), groups_of(config)
    for group in ("model", "draft", "dataset"):
        content = component_of(config, group).fingerprint() if group in used else None
        if content is not None:
            values[f"{group}.content"] = content
    return values


def settings_of(config: Config) -> dict[str, object]:
    """The part of the identity that is known without reading any content: every identity field and the component names."""
    values: dict[str, object] = {"version": IDENTITY_VERSION}
    used, idle = groups_of(config), unused(config)
    values.update({group: name_of(component_of(config, group)) for group in used})
    values.update({name: value for name, value in identity_values(config).items() if name.partition(".")[0] not in idle})
    for group in used:
        component: Any = component_of(config, group)
        values.update({f"{group}.{name}": value for name, value in component.retired.items()})
        specs = {field.name: spec_of(field) for field in dataclasses.fields(component) if has_spec(field)}
        for name, value in component.canonical(config).items():
            if name in specs and specs[name].is_off(value):
                values.pop(f"{group}.{name}", None)
            else:
                values[f"{group}.{name}"] = value
    return values


def effects_of(config: Config) -> dict[str, object]:
    """The values of all fields, identity and runtime, except those that have no effect in this configuration.

    Two configurations with the same effects do the same. No content is read.
    """
    idle = unused(config)
    values = {name: value for name, field, _, value in walk(config)
              if not spec_of(field).no_effect and name.partition(".")[0] not in idle}
    return {**values, **settings_of(config)}


def identity_hash(config: Config) -> str:
    """Twelve hexadecimal digits of a configuration's identity. Reads dataset and checkpoint."""
    return hash_of(identity_of(config))


def run_folder(config: Config, digest: str) -> Path:
    """`outputs/<name>/<parts>-<identity>`: a function of the identity alone, not of the condition's name."""
    parts = parts_of(config, ("probe", "blend", "draft", "sampler", "decoder", "engine", "dataset"))
    return Path(config.paths.outputs) / config.name / "-".join([*parts, digest])


def plain(config: Config) -> dict[str, object]:
    """The configuration's values as nested dictionaries, with the name of each component and without unused fields."""
    values = dataclasses.asdict(config)
    for group in GROUPS:
        values[group] = {"name": name_of(component_of(config, group)), **values[group]}
    return {name: value for name, value in values.items() if name not in unused(config)}
