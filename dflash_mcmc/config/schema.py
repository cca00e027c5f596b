"""The typed configuration of a run, its checks and its identity. Nothing here touches a model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_mcmc.errors import ConfigError, UserError, did_you_mean, note
from dflash_mcmc.fields import check_bounds, identity, runtime, spec_of, walk
from dflash_mcmc.registry import GROUPS, components, load_all, name_of

Root = TypeVar("Root")
PACKAGE = Path(__file__).resolve().parent.parent
_OF_THE_MACHINE = ("hardware", "tracker")
"""Groups that change no output."""
IDENTITY_VERSION = 3
"""Raised when the meaning of a field changes, so that old records are not continued under the new one."""


@dataclass(slots=True, kw_only=True)
class Paths:
    """Where things lie."""

    outputs: str = runtime("folder that the run folders are made in")
    assets: str = runtime("folder of what ships with the package: the embedded model")


@dataclass(slots=True, kw_only=True)
class Assumed:
    """What an estimate (`estimate.py`) takes for granted, since nothing is drawn for it."""

    prompt_length: int = runtime("mean length of a prompt in tokens", ge=1)
    answer_length: float = runtime("mean length of an answer, as a share of dataset.max_new_tokens", gt=0, le=1)
    acceptance: float = runtime("share of the proposals' tokens that stand in accepted proposals", ge=0, le=1)
    abandoned_at: float = runtime("share of a rejected proposal that is drawn before early rejection ends it", ge=0, le=1)
    identical: float = runtime("share of the tokens to draw that hardware.skip_identical takes over", ge=0, le=1)
    tokens_per_second: float | None = runtime("token-forwards a second, where hardware.tokens_per_second tells none that was "
                                              "measured; null = hours are not told", gt=0)


@dataclass(slots=True, kw_only=True)
class Condition:
    """A named pair of sampler and blend: a row of the published tables."""

    name: str | None = runtime("label of the run in tables and folders; null names it by its sampler and blend")
    sampler: str | None = runtime("sampler that the condition stands for")
    blend: str | None = runtime("blend that the condition stands for")


@dataclass(slots=True, kw_only=True)
class Config:
    """One run: a condition on a dataset with a model."""

    name: str = runtime("of the experiment: its folder of runs, and the group in the tracker; letters, digits, . _ -")
    condition: Condition = dataclasses.field(default_factory=Condition)
    seed: int = identity("of all randomness")
    num_chains: int = runtime("samples of each problem; may be raised later", ge=1)
    aggregate: str | None = runtime("one answer a problem of all its chains, as a row of its own, and what a search goes by: "
                                    "majority, or log_p = the likeliest; null = samples alone",
                                    choices=("majority", "log_p"))
    objective: str = runtime("what a search (sweep=optuna) maximises: accuracy, or accuracy_per_cost = correct samples per "
                             "million token-forwards", choices=("accuracy", "accuracy_per_cost"))
    dry_run: bool = runtime("tell samples, token-forwards and hours; load and write nothing")
    show: str | None = runtime("prompt = tell the whole text that the model is given for the first problem; load no weights "
                               "and write nothing", choices=("prompt",))
    assumed: Assumed = dataclasses.field(default_factory=Assumed)
    model: Any = MISSING
    draft: Any = MISSING
    blend: Any = MISSING
    sampler: Any = MISSING
    decoder: Any = MISSING
    probe: Any = MISSING
    dataset: Any = MISSING
    grader: Any = MISSING
    hardware: Any = MISSING
    tracker: Any = MISSING
    paths: Paths = dataclasses.field(default_factory=Paths)

    def label(self) -> str:
        """The run's name in tables: its condition, or what it is made of; a probe's stands before it."""
        made_of = [self.condition.name] if self.condition.name else _parts(self, ("blend", "draft", "sampler", "decoder"))
        return "_".join([*_parts(self, ("probe",)), *made_of])


def store_schemas() -> None:
    """Registers the schemas of all components and of the root with Hydra."""
    load_all()
    ConfigStore.instance().store(group="schema", name="config", node=Config, provider="dflash_mcmc")


def to_typed(composed: DictConfig, cls: type[Root]) -> Root:
    """The typed object of a composed configuration, each field within its bounds. Raises UserError, of one line."""
    _refuse_unknown_and_missing(composed, cls, "")
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UserError(" ".join(str(error).split())) from error
    check_bounds(config)
    return config


def to_config(composed: DictConfig) -> Config:
    """The typed configuration of a run, checked as a whole. Raises UserError, of one line."""
    return checked(to_typed(composed, Config))


def checked(config: Config) -> Config:
    """The same configuration after the checks that span fields, with resolved components. Raises UserError, of one line."""
    _check_condition(config)
    _check_draft(config)
    _check_aggregate(config)
    used = (*groups_of(config), *_OF_THE_MACHINE)
    for group in used:
        component = getattr(config, group)
        if hasattr(component, "check"):
            component.check(config)
    for group in used:
        component = getattr(config, group)
        if hasattr(component, "resolved"):
            setattr(config, group, component.resolved(config))
    return config


def groups_of(config: Config) -> tuple[str, ...]:
    """The groups that the outputs come from: with a probe itself and those that it uses, without one all others."""
    if name_of(config.probe) != "none":
        return ("probe", *config.probe.uses)
    return tuple(group for group in GROUPS if group not in ("probe", *_OF_THE_MACHINE))


def unused(config: Config) -> set[str]:
    """Root fields that change nothing here, since the probe does not use them."""
    idle = set(GROUPS) - {*groups_of(config), "probe", *_OF_THE_MACHINE}
    return idle | ({"condition"} if idle & {"sampler", "blend"} else set()) | ({"num_chains"} if "sampler" in idle else set())


def field_of(name: str, composed: DictConfig) -> tuple[dataclasses.Field, object] | None:
    """The field that a dotted name stands for in a composed configuration, and its declared type."""
    parent, _, last = name.rpartition(".")
    node = OmegaConf.select(composed, parent) if parent else composed
    cls = OmegaConf.get_type(node) if node is not None else None
    if not dataclasses.is_dataclass(cls):
        return None
    types = typing.get_type_hints(cls)
    return next(((field, types[last]) for field in dataclasses.fields(cls) if field.name == last), None)


def _refuse_unknown_and_missing(node: DictConfig, cls: type, prefix: str) -> None:
    known = [field.name for field in dataclasses.fields(cls)]
    for key in node:
        if key not in known:
            raise unknown_field(f"{prefix}{key}", known)
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        spec = spec_of(field)
        if field.name not in node or OmegaConf.is_missing(node, field.name):
            allowed = spec.describe(types[field.name]) if spec else f"an option of the group, {field.name}=..."
            raise UserError(f"{prefix}{field.name}: not given; allowed: {allowed}")
        child = OmegaConf.select(node, field.name)
        if isinstance(child, DictConfig):
            _refuse_unknown_and_missing(child, OmegaConf.get_type(child), f"{prefix}{field.name}.")


def unknown_field(name: str, known: list[str], elsewhere: Sequence[str] = ()) -> UserError:
    """The error for a key that no schema has; `elsewhere` are fields and options that it may have been meant for."""
    parent, _, last = name.rpartition(".")
    fields = ", ".join(known) or f"nothing, with this {parent}"
    hint = did_you_mean(last, known)
    if elsewhere and not hint:
        hint = f" (a field of {', '.join(elsewhere)})" if parent else f" (did you mean {' or '.join(elsewhere)}?)"
    return UserError(f"{name}: unknown field{hint}; allowed{' in ' + parent if parent else ''}: {fields}")


def _check_condition(config: Config) -> None:
    for field, name in (("name", config.name), ("condition.name", config.condition.name or "x")):
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ConfigError(field, name, "letters, digits, . _ - (it is the name of a folder)")
    for group in ("sampler", "blend"):
        stands_for, chosen = getattr(config.condition, group), name_of(getattr(config, group))
        if stands_for is not None and stands_for != chosen:
            raise ConfigError(group, chosen, f"{stands_for!r}, which condition={config.condition.name} stands for; or leave "
                              "the condition out")


def _check_draft(config: Config) -> None:
    """A draft is there where one is needed. One that nothing uses is left out, and told: some points of a sweep do without.

    Raises ConfigError.
    """
    used = groups_of(config)
    users = [group for group in used if getattr(getattr(config, group), "needs_draft", False)]
    takers = [group for group in used if getattr(getattr(config, group), "takes_draft", False)]
    draft = name_of(config.draft)
    if users and draft == "none":
        chosen = " and ".join(f"{group}={name_of(getattr(config, group))}" for group in users)
        raise ConfigError("draft", draft, f"a draft, such as tiny (the embedded model's) or dflash, with {chosen}")
    if not users and not takers and draft != "none":
        chosen = ", ".join(f"{group}={name_of(getattr(config, group))}" for group in ("blend", "sampler", "decoder", "probe")
                           if group in used)
        note(f"draft={draft} is left out where nothing uses it: {chosen}")
        config.draft = components("draft")["none"].cls()


def _check_aggregate(config: Config) -> None:
    """Raises ConfigError."""
    if config.aggregate is not None and config.num_chains < 2:
        raise ConfigError("aggregate", config.aggregate, f"null, or num_chains of 2 and more (given {config.num_chains})")
    if config.aggregate == "majority" and name_of(config.grader) == "code":
        raise ConfigError("aggregate", config.aggregate, "null or log_p with grader=code: programs are no votes")


def identity_of(config: Config) -> dict[str, object]:
    """What can change an output: every identity field, the component names, and the content of model and dataset."""
    values, used = settings_of(config), groups_of(config)
    for group in ("model", "draft", "dataset"):
        component = getattr(config, group)
        if group in used and hasattr(component, "fingerprint"):
            values[f"{group}.content"] = component.fingerprint()
    return values


def settings_of(config: Config) -> dict[str, object]:
    """The identity but for content, which has to be read: every identity field and the component names."""
    values: dict[str, object] = {"version": IDENTITY_VERSION}
    used, idle = groups_of(config), unused(config)
    values.update({group: name_of(getattr(config, group)) for group in used})
    values.update({name: value for name, field, _, value in walk(config)
                   if spec_of(field).role == "identity" and name.partition(".")[0] not in idle})
    for group in used:
        component = getattr(config, group)
        if hasattr(component, "canonical"):
            values.update({f"{group}.{name}": value for name, value in component.canonical(config).items()})
    return values


def identity_hash(config: Config) -> str:
    """Twelve hexadecimal digits of the identity."""
    return hash_of(identity_of(config))


def hash_of(identity: dict[str, object]) -> str:
    """Twelve hexadecimal digits of an identity at hand: working it out anew reads dataset and checkpoint again."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def run_folder(config: Config, digest: str) -> Path:
    """`outputs/<name>/<parts>-<identity>`: a function of the identity alone, whatever the condition is called."""
    parts = _parts(config, ("probe", "blend", "draft", "sampler", "decoder", "dataset"))
    return Path(config.paths.outputs) / config.name / "-".join([*parts, digest])


def _parts(config: Config, groups: tuple[str, ...]) -> list[str]:
    """Names of the components that are used, for a reader of the folder; without those that say nothing."""
    names = [name_of(getattr(config, group)) for group in groups if group in groups_of(config)]
    return [name for name in names if name not in ("none", "plain")]


def plain(config: Config) -> dict[str, object]:
    """Nested dictionaries of the configuration's values, with the name of each component; without what is not used."""
    values = dataclasses.asdict(config)
    for group in GROUPS:
        values[group] = {"name": name_of(getattr(config, group)), **values[group]}
    return {name: value for name, value in values.items() if name not in unused(config)}
