"""The identity of a run: the values that can change an output, their hash, the run folder, the label, and `config.yaml`.

A label, such as `temp temperature=1.5`, is the condition and the fields that differ from its defaults: those of the classes,
with the values that the options in `conf/` and the run's experiment set. Values are compared in their canonical form, as in
the identity. A configuration in memory and the same one in `config.yaml` have the same label. `with_fields`
writes every label of a point: of a bar, a grid's row, a table's row, a report and a listing.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from dflash_mcmc import components
from dflash_mcmc.components import GROUPS, identity_values, name_of, registered
from dflash_mcmc.config.schema import Config, Job, component_of, parts_of, unused
from dflash_mcmc.errors import ConfigError, UserError, printable, reason_of
from dflash_mcmc.options import config_folder, option_files
from dflash_mcmc.statistics.votes import Vote
from dflash_mcmc.store.records import CONFIG, hash_of, read_text

IDENTITY_VERSION = 4
"""Increased when the meaning of a field changes, so that no run continues records with the old meaning."""
_GROUPS = ("blend", "sampler", "decoder")
"""The groups whose fields a label names."""
_IN_A_LABEL = ("condition", "blend", "sampler", "draft", "decoder")
"""Groups whose options the label of a run names; the label of a condition names the first three."""
_LONGEST = 24
_EQUAL = 1e-9
_DIGITS = 8
"""Digits of a hash that are shown."""


def identity_of(config: Config) -> dict[str, object]:
    """The values that can change an output: identity fields, component names, and the content of files."""
    identity, used = settings_of(config), components.groups_of(config)
    for group in ("model", "draft", "blend", "sampler", "potential", "dataset", "engine"):
        if group == "model" and group in used and config.engine.is_remote:
            content = config.model.fingerprint(weights=False)
        else:
            content = component_of(config, group).fingerprint() if group in used else None
        if content is not None:
            identity[f"{group}.content"] = content
    return identity


def settings_of(config: Config) -> dict[str, object]:
    """The part of the identity that is known without reading any content: every identity field and the component names."""
    settings: dict[str, object] = {"version": IDENTITY_VERSION}
    used, idle = components.groups_of(config), unused(config)
    settings.update({group: name_of(component_of(config, group)) for group in used})
    settings.update({name: value for name, value in identity_values(config).items() if name.partition(".")[0] not in idle})
    for group in used:
        component: Any = component_of(config, group)
        settings.update({f"{group}.{name}": value for name, value in component.canonical(config).items()})
    return settings


def effects_of(config: Config) -> dict[str, object]:
    """The values of all fields, identity and runtime, except those that have no effect in this configuration.

    Two configurations with the same effects do the same. No content is read.
    """
    idle = unused(config)
    values = {name: value for name, field, _, value in components.walk(config)
              if not components.spec_of(field).no_effect and name.partition(".")[0] not in idle}
    return {**values, **settings_of(config)}


def identity_hash(config: Config) -> str:
    """Twelve hexadecimal digits of a configuration's identity. Reads dataset and checkpoint."""
    return hash_of(identity_of(config))


def run_folder(config: Config, digest: str) -> Path:
    """`outputs/<name>/<parts>-<identity>`: a function of the identity alone, not of the condition's name."""
    names = parts_of(config, ("probe", "blend", "draft", "sampler", "potential", "decoder", "engine", "dataset"))
    return Path(config.paths.outputs) / config.name / "-".join([*names, digest])


def plain(config: Config) -> dict[str, object]:
    """The configuration's values as nested dictionaries, with the name of each component and without unused fields."""
    nested = dataclasses.asdict(config)
    for group in GROUPS:
        nested[group] = {"name": name_of(component_of(config, group)), **nested[group]}
    return {name: value for name, value in nested.items() if name not in unused(config)}


def as_yaml(values: Mapping[str, Any]) -> str:
    """Values as OmegaConf writes them. Each text stays as it is: `${x}` names no other field."""
    return OmegaConf.to_yaml(OmegaConf.create(literal(values)), resolve=True)


def literal(value: Any) -> Any:
    """Values whose texts OmegaConf resolves to the given ones: a `${` in them begins no name of a field."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {name: literal(entry) for name, entry in value.items()}
    return [*map(literal, value)] if isinstance(value, (list, tuple)) else value


def node_of(group: str, values: Mapping[str, Any]) -> DictConfig:
    """The node of a component of which `plain` wrote these values: `name`, and its fields.

    Raises LookupError without a known name, and OmegaConfBaseException for wrong fields.
    """
    fields = literal(dict(values))
    return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(registered(group)[fields.pop("name")].cls), fields))


def label_of(config: Config) -> str:
    """The label of a configuration in memory: its name, and the fields that differ from the defaults."""
    return with_fields(config.label(), _numbered(config, changes(plain(config))))


def _numbered(config: Config, fields: Mapping[str, object]) -> dict[str, object]:
    """The fields, with layers numbered from 0 as in the identity: a run has one name, whether -12 or 12 was asked for."""
    known: dict[str, object] = {}
    with suppress(UserError):  # a model that cannot be read is refused elsewhere
        for group in _GROUPS:
            component: Any = component_of(config, group)
            known |= {f"{group}.{name}": value for name, value in component.canonical(config).items()}
    return {key: known[key] if isinstance(known.get(key), int | list) else value for key, value in fields.items()}


def labels_of(names: Sequence[str], identities: Sequence[Mapping[str, Any]],
              configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The labels of runs that are shown together.

    If several runs have the same name, the settings that vary among them are in the labels of all of them. The fields of a
    component are settings of the runs that have it. A field that is no default is named too, unless it is equal in all of
    several runs that have it. Models, drafts and data sets have the names of their folders or their hub
    names.
    """
    shown = [followed(identity) for identity in with_names(identities, configs)]
    labels = []
    for name, identity, own in zip(names, shown, map(changes, configs), strict=True):
        kept: dict[str, object] = {}
        for key, value in own.items():
            values = [json.dumps(other[key]) for other in shown if key in other]
            if len(values) < 2 or len(set(values)) > 1:  # not one value of all that have the field
                kept[key] = identity.get(key, value)
        alike = [other for other_name, other in zip(names, shown, strict=True) if other_name == name]
        for key in varying(alike):
            group, is_field, _ = key.partition(".")
            # a field is compared among the runs that have the option of this one
            among = [other for other in alike if not is_field or other.get(group) == identity.get(group)]
            if key in identity and (not is_field or key in varying(among)):
                kept[key] = identity[key]
        labels.append(with_fields(name, kept))
    return labels


def varying(identities: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields whose values are not the same in all identities, sorted. A field that an identity lacks is null."""
    names = sorted({name for identity in identities for name in identity})
    return [name for name in names if len({json.dumps(identity.get(name)) for identity in identities}) > 1]


def swept_names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The names of the overrides that are not common to all jobs, in the order of the command line."""
    common = set.intersection(*map(set, jobs)) if jobs else set()
    return list(dict.fromkeys(text.partition("=")[0] for job in jobs for text in job if text not in common))


def point_labels(jobs: Sequence[Job]) -> list[str]:
    """The labels of the points of a command. A value that differs between them is shown even where it is the default."""
    swept = swept_names([job.overrides for job in jobs])
    return [point_label(job, swept) for job in jobs]


def point_label(job: Job, swept: Sequence[str]) -> str:
    """The label of one point, with its values of the swept names."""
    values = {key: value for key, _, value in (text.partition("=") for text in job.overrides)}
    named = _IN_A_LABEL[: 3 if job.config.condition.name else None]
    own = {key: values[key] for key in swept if key in values and key not in named}
    return with_fields(job.config.label(), _numbered(job.config, own)) if swept else label_of(job.config)


def with_fields(name: str, fields: Mapping[str, object]) -> str:
    """A name and fields as one text: `ps alpha=2 num_steps=10`. `fields` has dotted names; the text has their last parts.

    Fields are in the order of their dotted names, in every label.

    A file is named by its group: `dataset=own.jsonl`. Beside the group's option it is named `path=own.jsonl`, and not
    at all if its name is the option's.
    """
    shown, texts = {key: _shown(key, value) for key, value in sorted(fields.items())}, []
    for key, text in shown.items():
        group, _, last = key.rpartition(".")
        if group and last in ("content", "path"):  # of a file or a folder
            if shown.get(group) == text.partition(".")[0]:
                continue
            last = "path" if group in shown else group
        texts.append(f"{last}={text}")
    return printable(" ".join([name, *texts]))


def _shown(key: str, value: object) -> str:
    """A value as a short text.

    A path becomes the name of what it stands for, a content hash is cut to its first digits, and a long text, e.g. a prompt,
    becomes its hash.
    """
    text = "null" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    if key.endswith(".path") and (name := name_of_path(value)):
        return name
    if re.fullmatch("[0-9a-f]{32}", text):
        return text[:_DIGITS]
    is_named = key.endswith(".content") and isinstance(value, str)
    is_short = len(text) <= _LONGEST and text.isprintable()
    return text if is_named or is_short else f"#{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def with_names(identities: Sequence[Mapping[str, Any]], configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The identities, with the names of model, draft and data set in place of the hashes of their contents.

    A name is that of a folder or file, or the hub name. If contents of one name differ, the first digits of their hashes
    follow the name. A hash stays where the configuration has no path, and where all runs have the same content.

    Args:
        configs: the configurations of the runs, as `config.yaml` has them.
    """
    named = [dict(identity) for identity in identities]
    for key in {key for identity in identities for key in identity if key.endswith(".content")}:
        names = [name_of_path(fields.get("path", fields.get("model")))  # a blend has a model
                 for config in configs for fields in [config.get(key.partition(".")[0]) or {}]]
        several, contents = len({identity.get(key) for identity in identities}) > 1, dict[str, set[object]]()
        for name, identity in zip(names, identities, strict=True):
            contents.setdefault(name, set()).add(identity.get(key))
        for name, shown in zip(names, named, strict=True):
            if name and shown.get(key) and several:
                shown[key] = name if len(contents[name]) == 1 else f"{name}@{str(shown[key])[:_DIGITS]}"
    return named


def name_of_path(path: object) -> str:
    """The name of a folder or file, or a hub name such as `Qwen/Qwen3-4B`, which has two parts; empty without a path."""
    if not isinstance(path, str) or not path:
        return ""
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) and not Path(path).exists()
    return path if is_hub_name else Path(path).name


def configuration_of(folder: Path) -> dict[str, Any]:
    """The configuration of a run. Raises UserError for a file that a run did not write, and for a value of another type."""
    path = folder / CONFIG
    try:
        config = yaml.safe_load(read_text(path))
    except (YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be parsed: {reason_of(error, 120)}; allowed: the file as a run wrote it") from error
    if not isinstance(config, dict) or "name" not in config:
        raise UserError(f"{path}: holds no configuration of a run")
    try:
        # Checks the fields of the whole run, and those of the groups that tables and reports read
        components.check_types(Config, config, "")
        names = config.get("aggregate")
        if not all(isinstance(name, str) for name in (names if isinstance(names, list) else [names or ""])):
            raise ConfigError("aggregate", names, "a name, or a list of names")
        Vote.of(config.get("vote") or {})
        for group in (*_GROUPS, "model", "draft", "dataset", "grader"):
            fields = config.get(group) or {}
            if not isinstance(fields, Mapping):
                raise ConfigError(group, fields, "the fields of a component")
            if option := registered(group).get(str(fields.get("name"))):
                components.check_types(option.cls, fields, f"{group}.")
        changes(config)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path}: holds no configuration of a run: {reason_of(error)}") from error
    return config


def changes(values: Mapping[str, Any]) -> dict[str, object]:
    """The identity fields whose values differ from those of the run's options, by dotted name.

    Args:
        values: a configuration as `config.yaml` has it: a dictionary for each group, with the `name` of its component.
    """
    changed: dict[str, object] = {}
    for group in _GROUPS:
        fields = values.get(group)
        if not isinstance(fields, Mapping) or fields.get("name") not in registered(group):
            continue  # a probe does not use the group, or the option is from a folder of the user
        # Of several options of a component, such as layer and noise, the label has the name of the first.
        option = _option(group, fields["name"], str(values.get("name")), _name(values, "dataset"), _name(values, "condition"))
        here, own = (followed(_canonical(group, values, {**option, **more})) for more in (fields, {"name": fields["name"]}))
        changed |= {key: value for key, value in here.items() if own.get(key) != value}
    return changed


def _canonical(group: str, recorded: Mapping[str, Any], fields: Mapping[str, object]) -> dict[str, object]:
    """The identity fields that have an effect, in canonical form by dotted name, of a component with these fields."""
    values = {**recorded, group: fields}
    components_of_run = {group: _component(group, values.get(group)) for group in (*_GROUPS, "draft")}
    unread = SimpleNamespace(num_layers=lambda: None)  # its checkpoint may be elsewhere: layers keep the number that was given
    config = components.restored(Config, {**components_of_run, "model": unread})
    component: Any = getattr(config, group)
    shown = {**identity_values(component), **component.canonical(config)}
    return {group: fields["name"], **{f"{group}.{key}": value for key, value in shown.items() if value is not None}}


def _name(recorded: Mapping[str, Any], group: str) -> str:
    fields = recorded.get(group)
    return str(fields.get("name")) if isinstance(fields, Mapping) else ""


def _component(group: str, fields: Mapping[str, object] | None) -> Any:
    """The component with these fields. A missing field is null. If `fields` is None, or of a component that nothing here
    registers, the option that has no effect.
    """
    options = registered(group)
    if fields is None or str(fields["name"]) not in options:
        return next((option.cls() for option in options.values() if option.cls.is_null), None)
    cls = options[str(fields["name"])].cls
    return components.restored(cls, {field.name: fields.get(field.name) for field in dataclasses.fields(cls)})


def followed(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity, with a text such as `1/alpha` in place of a value that is the inverse of another (`Spec.inverse_of`)."""
    shown = dict(identity)
    for group in _GROUPS:
        option = registered(group).get(str(identity.get(group)))
        cls: Any = option.cls if option else None  # mypy does not take a class for hashable
        for name, spec in components.specs_of(cls).items() if cls else ():
            if spec.inverse_of and _is_inverse(identity.get(f"{group}.{name}"), identity.get(f"{group}.{spec.inverse_of}")):
                shown[f"{group}.{name}"] = f"1/{spec.inverse_of}"
    return shown


def _is_inverse(value: Any, other: Any) -> bool:
    """Whether a number, or each of a list, is one divided by the other."""
    if isinstance(value, Sequence) and isinstance(other, Sequence):
        return len(value) == len(other) and all(map(_is_inverse, value, other))
    return all(isinstance(part, (int, float)) for part in (value, other)) and abs(value * other - 1.0) < _EQUAL


@functools.cache
def _option(group: str, name: str, experiment: str, dataset: str, condition: str) -> dict[str, object]:
    """The fields of a component's option of its own name, with the values that condition, experiment and its dataset set."""
    fields = {field.name: components.default_of(field) for field in dataclasses.fields(registered(group)[name].cls)}
    if (path := option_files().get(group, {}).get(name)) is not None and path.suffix == ".yaml":
        fields |= {key: value for key, value in _read(path).items() if key != "defaults"}
    of_experiment = config_folder() / "experiment"
    for preset in (config_folder() / "condition" / f"{condition}.yaml", of_experiment / f"{experiment}.yaml",
                   of_experiment / f"with_{group}" / f"{experiment}-{name}.yaml",
                   of_experiment / "with_dataset" / f"{experiment}-{dataset}.yaml"):
        fields |= (_read(preset).get(group) or {}) if preset.is_file() else {}
    return fields


def _read(path: Path) -> dict[str, Any]:
    return dict(OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]  # every file of conf/ is a mapping
