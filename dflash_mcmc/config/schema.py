"""The typed configuration of a run, its checks, and the job with it. Nothing here touches a model.

`Slurm` has the fields of `hydra/launcher=slurm`: the resources of a grid's jobs, and how they handle time limits and failures.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_mcmc import components
from dflash_mcmc.components import GROUPS, groups_of, identity, name_of, options_with, runtime
from dflash_mcmc.errors import ConfigError, UnknownName, UserError, did_you_mean, note, shortened
from dflash_mcmc.options import option_files
from dflash_mcmc.statistics.summaries import NAMES
from dflash_mcmc.statistics.votes import PROGRAM_RULES, VOTES, Vote
from dflash_mcmc.types import Lengths

if TYPE_CHECKING:
    import numpy as np

    from dflash_mcmc.blend import Blend
    from dflash_mcmc.dataset import Dataset
    from dflash_mcmc.decoder import Decoder
    from dflash_mcmc.draft import Draft
    from dflash_mcmc.engine import Engine
    from dflash_mcmc.grading import Grader
    from dflash_mcmc.hardware import Hardware
    from dflash_mcmc.model import Model
    from dflash_mcmc.potential import Potential
    from dflash_mcmc.probe import Probe
    from dflash_mcmc.sampler import Sampler
    from dflash_mcmc.tracker import Tracker
else:  # OmegaConf takes no other type for a field that several dataclasses can fill
    Blend = Dataset = Decoder = Draft = Engine = Grader = Hardware = Any
    Model = Potential = Probe = Sampler = Tracker = Any


Root = TypeVar("Root")
PACKAGE = Path(__file__).resolve().parent.parent
OF_THE_MACHINE = ("hardware", "engine", "tracker")
"""Groups that every run uses, whatever its probe. None of them changes an output, but for an engine that rounds otherwise."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Paths:
    """Folders of inputs and outputs."""

    outputs: str = runtime("outputs", "parent folder of all run folders")
    assets: str = runtime(MISSING, "folder of the files that ship with the package: the embedded model")

    def __post_init__(self) -> None:
        self.outputs = os.path.expanduser(self.outputs)
        if not self.outputs.strip():
            raise ConfigError("paths.outputs", self.outputs, "a folder; . is this one")


@dataclasses.dataclass(slots=True, kw_only=True)
class Condition:
    """A named pair of sampler and blend: a row of the published tables."""

    name: str | None = runtime(None, "label of the run in tables and folders; null names it by its sampler and blend")
    sampler: str | None = runtime(None, "sampler of the condition")
    blend: str | None = runtime(None, "blend of the condition")


@dataclasses.dataclass(slots=True, kw_only=True)
class Config:
    """One run: a condition on a dataset with a model."""

    name: str = runtime("default", "name of the experiment, its folder and its group in the tracker; letters, digits, . _ -")
    condition: Condition = dataclasses.field(default_factory=Condition)
    seed: int = identity(0, "seed of all randomness")
    num_chains: int = runtime(1, "number of samples of each problem; may be raised later", ge=1, le=1_000_000)
    aggregate: Any = runtime(None, "one answer per problem from all its chains, as a row in the table: majority, power, "
                             "adaptive, log_p = the likeliest, or with grader.examples examples, behaviour, "
                             "examples_vote (statistics/votes.py); a list gives a row for each; null = no aggregate")
    vote: Vote = dataclasses.field(default_factory=Vote)
    repair: bool = runtime(False, "move damaged lines of the run's records to records.damaged.jsonl and draw their samples "
                           "again; false stops with an error that names the line")
    dry_run: bool = runtime(False, "print samples, token-forwards and hours; load and write nothing")
    show: Literal["prompt"] | None = runtime(
        None, "prompt = print the whole text that the model receives for the first problem; load no weights and write nothing")
    assumed: components.Assumed = dataclasses.field(default_factory=components.Assumed)
    model: "Model" = MISSING
    draft: "Draft" = MISSING
    blend: "Blend" = MISSING
    sampler: "Sampler" = MISSING
    potential: "Potential" = MISSING
    decoder: "Decoder" = MISSING
    probe: "Probe" = MISSING
    dataset: "Dataset" = MISSING
    grader: "Grader" = MISSING
    hardware: "Hardware" = MISSING
    engine: "Engine" = MISSING
    tracker: "Tracker" = MISSING
    paths: Paths = dataclasses.field(default_factory=Paths)

    def aggregates(self) -> list[str]:
        """The names in `aggregate`, in their order."""
        if self.aggregate is None:
            return []
        return list(self.aggregate) if isinstance(self.aggregate, list) else [self.aggregate]

    def label(self) -> str:
        """The run's name in tables: its condition, or the names of its components; a probe's name comes first."""
        rated = parts_of(self, ("potential",))
        made_of = [self.condition.name, *rated] if self.condition.name else [
            *parts_of(self, ("blend", "draft", "sampler")), *rated, *parts_of(self, ("decoder",))]
        return "_".join([*parts_of(self, ("probe",)), *made_of, *parts_of(self, ("engine",))])


class Job(NamedTuple):
    """One run. `config` alone says what it does; the other fields describe it in tables and trackers, or spare it work."""

    config: Config
    overrides: tuple[str, ...] = ()
    """The overrides of the command line that apply to this job."""
    choices: Mapping[str, str] = MappingProxyType({})
    """The chosen option of each configuration group, by group."""
    left_out: tuple[str, ...] = ()
    """Names of the fields and groups that the command line sets and that do not apply to this job."""
    title: str = ""
    """The name of a job of a sweep in its progress bar, `[3/12] blend_ps alpha=4`; empty outside a sweep."""
    prompts: "Mapping[str, np.ndarray]" = MappingProxyType({})
    """Token ids of prompts by the ids of their problems, as far as the checks of the command have encoded them."""
    lengths: Lengths = Lengths()
    """What the checks of the command have counted of the problems."""


def store_schemas() -> None:
    """Registers the components and the root with Hydra. A component is an option, unless `conf/` has a file of its name."""
    components.load_all()
    store, files = ConfigStore.instance(), option_files()
    for group in GROUPS:
        for name, option in components.registered(group).items():
            in_a_file = name in files[group] and files[group][name].suffix == ".yaml"
            if not in_a_file and f"{name}.yaml" not in store.repo.get(group, {}):
                store.store(group=group, name=name, node=option.cls, provider="dflash_mcmc")
    store_schema("config", Config)


def store_schema(root: str, cls: type) -> None:
    """Registers the schema of a root configuration with Hydra, once: to build it takes half as long as to compose with it."""
    store = ConfigStore.instance()
    if f"{root}.yaml" not in store.repo.get("schema", {}):
        store.store(group="schema", name=root, node=components.schema_of(cls), provider="dflash_mcmc")


def to_typed(composed: DictConfig, cls: type[Root], prefix: str = "") -> Root:
    """The typed object of a composed configuration, each field within its bounds. Raises UserError.

    Args:
        prefix: what precedes a field's name in errors.
    """
    _refuse_unknown_and_missing(composed, cls, prefix)
    try:
        config: Any = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UserError(" ".join(str(error).split())) from error
    components.check_bounds(config, prefix)
    return config


def unused(config: Config) -> set[str]:
    """Root fields that have no effect in this configuration, because its probe does not use them."""
    idle = set(GROUPS) - {*groups_of(config), "probe", *OF_THE_MACHINE}
    return idle | ({"condition"} if idle & {"sampler", "blend"} else set()) | ({"num_chains"} if "sampler" in idle else set())


def parts_of(config: Config, groups: tuple[str, ...]) -> list[str]:
    """Names of the used components, for labels and folders. Options such as `none` are left out."""
    used = [component_of(config, group) for group in groups if group in groups_of(config)]
    return [name_of(component) for component in used if not component.is_null]


def component_of(config: Config, group: str) -> components.Component:
    """The component that is chosen in a group."""
    return getattr(config, group)


def field_of(name: str, composed: DictConfig) -> tuple[dataclasses.Field, object] | None:
    """The field with a dotted name in a composed configuration, and its declared type."""
    parent, _, last = name.rpartition(".")
    node = OmegaConf.select(composed, parent) if parent else composed
    cls = OmegaConf.get_type(node) if node is not None else None
    if not dataclasses.is_dataclass(cls):
        return None
    types = components.types_of(cls)
    return next(((field, types[last]) for field in dataclasses.fields(cls) if field.name == last), None)


def _refuse_unknown_and_missing(node: DictConfig, cls: type, prefix: str) -> None:
    names = [field.name for field in dataclasses.fields(cls)]
    for key in node:
        if key not in names:
            raise unknown_field(f"{prefix}{key!s}", names)
    types = components.types_of(cls)
    for field in dataclasses.fields(cls):
        if field.name not in node or OmegaConf.is_missing(node, field.name):
            allowed = f"an option of the group, {field.name}=..."
            if components.has_spec(field):
                spec = components.spec_of(field)
                allowed = f"{spec.describe(types[field.name])} ({spec.help.partition(';')[0]})"
            raise UserError(f"{prefix}{field.name}: not given; allowed: {allowed}")
        child = OmegaConf.select(node, field.name)
        kind: Any = OmegaConf.get_type(child) if isinstance(child, DictConfig) else None
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            _refuse_unknown_and_missing(child, kind, f"{prefix}{field.name}.")


def unknown_field(name: str, known: list[str], meant: Sequence[str] = ()) -> UnknownName:
    """The error for a key that no schema has; `meant` are overrides that the user may have meant."""
    name = shortened(name)
    parent, _, last = name.rpartition(".")
    fields = ", ".join(known) or f"nothing, with this {parent}"
    hint = did_you_mean(last, known, meant[:3])
    return UnknownName(f"{name}: unknown field{hint}; allowed{' in ' + parent if parent else ''}: {fields}")


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
        config.draft = next(option for option in components.registered("draft").values() if option.cls.is_null).cls()


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


PREFIX = "hydra.launcher."
"""What precedes the name of a field of `Slurm` in an override."""
MOST_JOBS = 1000
"""Jobs of a grid, more than which a mistake asks for."""
_GPUS_OF_A_MODEL = "engine.tensor_parallel_size * engine.pipeline_parallel_size"


@dataclasses.dataclass(slots=True, kw_only=True)
class Slurm:
    """The jobs of a grid on SLURM: one for each shard of each point. Each job has one node."""

    partition: str | None = runtime(None, "partition, or several separated by commas; null = the cluster's default")
    account: str | None = runtime(None, "account that is charged; null = your default account")
    qos: str | None = runtime(None, "quality of service; null = your default")
    gpus: int = runtime(0, "GPUs of a job", ge=0, le=64)
    cpus: int = runtime(4, "CPU cores of a job", ge=1, le=1024)
    memory_gb: float | None = runtime(None, "memory of a job, in GB; null = the cluster's default", gt=0)
    minutes: int = runtime(60, "time limit of a job; shortly before it, the job is requeued and continues later", ge=1)
    array_parallelism: int = runtime(64, "largest number of the grid's jobs that run at once", ge=1)
    shards: int = runtime(1, "jobs that share each point, at most one for each pending sample", ge=1, le=10_000)
    processes: int | None = runtime(None, "processes of a job, started by accelerate if there are several; null = one for "
                                    "each GPU, or each group of GPUs that engine=vllm shares a model among", ge=1, le=64)
    grace_seconds: int = runtime(120, "time before the time limit in which started samples are finished or given up and the "
                                 "job is requeued; at most half of the limit", ge=5, le=3600)
    max_requeues: int = runtime(20, "how often a job is requeued, at time limits and preemptions", ge=0)
    max_restarts: int = runtime(5, "how often a worker process that dies without a new record is restarted in its job", ge=0)
    setup: list[str] = runtime([], "shell lines before Python starts: modules, a virtual environment")
    python: str | None = runtime(None, "command that starts Python in a job, such as `apptainer exec image.sif python`; null "
                                 "= the interpreter of the submission")
    confirm: bool = runtime(False, f"allow the submission of more than {MOST_JOBS:,} jobs")

    @property
    def num_processes(self) -> int:
        """Processes of a job."""
        return self.processes or max(1, self.gpus)

    def asked(self) -> str:
        """The fields that a cluster may refuse, as they are written on a command line. Fields that are null are left out."""
        names = ("partition", "account", "qos", "gpus", "cpus", "memory_gb", "minutes")
        values = {name: getattr(self, name) for name in names}
        return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)

    def with_groups(self, num_devices: int) -> "Slurm":
        """The fields where each process uses so many GPUs together. Raises ConfigError if the job has too few of them."""
        if not self.gpus or num_devices == 1:
            return self
        groups = self.gpus // num_devices
        if not groups:
            raise ConfigError(f"{PREFIX}gpus", self.gpus, f"at least {num_devices}, {_GPUS_OF_A_MODEL}")
        if self.processes is not None and self.processes > groups:
            raise ConfigError(f"{PREFIX}processes", self.processes, f"at most {groups} with gpus={self.gpus} and "
                              f"{num_devices} GPUs for each, {_GPUS_OF_A_MODEL}")
        return dataclasses.replace(self, processes=self.processes or groups)

    def check(self) -> None:
        """Raises ConfigError for what no single field can tell."""
        if 2 * self.grace_seconds > 60 * self.minutes:
            raise ConfigError(f"{PREFIX}grace_seconds", self.grace_seconds,
                              f"at most half of the time limit, {30 * self.minutes} with minutes={self.minutes}")
        if self.gpus and self.num_processes > self.gpus:
            raise ConfigError(f"{PREFIX}processes", self.processes,
                              f"at most one for each GPU, {self.gpus} with gpus={self.gpus}")
        for name in ("partition", "account", "qos", "python"):
            value = getattr(self, name)
            if value is not None and (not value.strip() or "\n" in value):
                raise ConfigError(f"{PREFIX}{name}", value, "a text of one line, or null")


@cache
def store_launcher() -> None:
    """Registers the fields of the launcher with Hydra, once."""
    node = components.schema_of(Slurm)
    ConfigStore.instance().store(group="schema/launcher", name="slurm", node=node, provider="dflash_mcmc")


def to_launcher(node: DictConfig) -> Slurm:
    """The checked fields of a composed `hydra.launcher`. Raises UserError."""
    launcher = to_typed(node, Slurm, PREFIX)
    launcher.check()
    return launcher


def changed_launcher(launcher: Slurm, overrides: Sequence[str]) -> Slurm:
    """The launcher with some fields changed, such as `minutes=240`. Raises UserError."""
    specs, node = components.specs_of(Slurm), OmegaConf.structured(launcher)
    for text in overrides:
        name, equals, value = text.removeprefix(PREFIX).partition("=")
        if not equals or name not in specs:
            raise UserError(f"cannot read {text!r}; allowed: field=value with a field of hydra/launcher=slurm: "
                            f"{', '.join(specs)}")
        try:
            node = OmegaConf.merge(node, OmegaConf.from_dotlist([f"{name}={value}"]))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{PREFIX}{name}", value, specs[name].describe(components.types_of(Slurm)[name])) from error
    return to_launcher(node)


def expand(arguments: Sequence[str]) -> list[str]:
    """A command line with full names for the launcher's fields: `shards=8` becomes `hydra.launcher.shards=8`."""
    names = components.specs_of(Slurm)
    return [PREFIX + text if text.partition("=")[0] in names and "=" in text else text for text in arguments]
