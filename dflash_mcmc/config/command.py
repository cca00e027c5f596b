"""The command line: everything wrong with it is one line, and is said before anything is loaded or written."""

from __future__ import annotations

import contextlib
import re
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple, NoReturn

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from dflash_mcmc.config.checks import to_config
from dflash_mcmc.config.jobs import Job
from dflash_mcmc.config.schema import PACKAGE, Config, Root, field_of, store_schemas, to_typed, unknown_field, unused
from dflash_mcmc.config.sweep import Sweep, deferred, points
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean
from dflash_mcmc.fields import has_spec, spec_of
from dflash_mcmc.grid.launcher import PREFIX, Slurm, store_schema, to_launcher
from dflash_mcmc.registry import GROUPS, components, name_of

_OF_COMPOSING = (HydraException, OmegaConfBaseException, ValueError, TypeError, OSError)
"""What Hydra raises over a command line that it cannot compose."""


def config_folder() -> Path:
    """`conf/` of the checkout, or the copy inside an installed package."""
    checkout = PACKAGE.parent / "conf"
    return checkout if (checkout / "config.yaml").is_file() else PACKAGE / "conf"


def prepare() -> None:
    """Registers schemas and resolvers with Hydra."""
    OmegaConf.register_new_resolver("dflash_assets", lambda: str(PACKAGE / "assets"), replace=True)
    OmegaConf.register_new_resolver("dflash_options", _list_options, replace=True)
    store_schemas()
    store_schema()


def _options() -> dict[str, list[str]]:
    """The options of every group of conf/, of those too that are no field of the configuration."""
    groups: dict[str, list[str]] = {}
    for file in sorted(config_folder().glob("*/*.yaml")):
        groups.setdefault(file.parent.name, []).append(file.stem)
    return groups


def _list_options() -> str:
    """A line for each group: what `--help` shows."""
    return "\n".join(f"  {group:<11} {'  '.join(names)}" for group, names in _options().items())


class Command(NamedTuple):
    """A checked command line."""

    arguments: list[str]
    """For Hydra."""
    jobs: list[Job]
    """What is to be run; none where something is to be shown."""
    sweep: Sweep | None
    """None for a single run."""
    launcher: Slurm | None
    """With hydra/launcher=slurm, which submits the jobs; None where they run here."""


def check_command(arguments: list[str]) -> Command:
    """Composes and checks every job of the command line. Raises UserError, of one line.

    A sweep is checked as a whole: a mistake in its last point is told before its first one starts.
    """
    parsed = _parse(arguments)
    if any(getattr(parsed, name, None) for name in ("help", "hydra_help", "version", "shell_completion")):
        return Command(arguments, [], None, None)
    for option in ("config_name", "config_path"):
        if getattr(parsed, option):
            flag = option.replace("_", "-")
            raise UserError(f"--{flag}: given {getattr(parsed, option)!r}; allowed: group=option, field=value, and a folder "
                            "of your own options with --config-dir")
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        overrides = [_parse_override(text) for text in parsed.overrides]
        hydra = _hydra(overrides)
        sweep, launcher = _sweep(hydra, parsed.multirun), _launcher(hydra, overrides)
        jobs: list[Job] = []
        for texts in _jobs(overrides, sweep):
            composed, chosen = _compose("config", texts)
            if (chosen["hydra/launcher"] == "slurm") != (launcher is not None):
                raise UserError("hydra/launcher: given slurm by something that is swept; allowed: one launcher for all points")
            config = to_config(composed)
            _refuse_unused(config, texts)
            jobs.append(Job(config, tuple(texts), chosen))
    if sweep and not jobs:
        raise UserError("the sweep: given no point; allowed: at least one value of everything that is swept")
    if sweep and sweep.num_trials is None:
        swept = {override.input_line: deferred(override) for override in overrides}
        arguments = [swept.get(text, text) for text in arguments]
    return Command(arguments, [] if parsed.cfg or parsed.info else jobs, sweep, launcher)


def _refuse_unused(config: Config, overrides: list[str]) -> None:
    """Nothing that is given is silently ignored: a probe says what it uses."""
    idle = unused(config)
    for text in overrides:
        name, _, value = text.lstrip("+~").partition("=")
        group = re.split(r"[.@/]", name)[0]
        if group in idle:
            raise ConfigError(name, value, f"nothing, since probe={name_of(config.probe)} does not use {group}")


def compose_once(config_name: str, overrides: list[str], cls: type[Root]) -> tuple[Root, dict[str, str]]:
    """The typed object of a root configuration and the option chosen in each group, for programs without sweeps."""
    prepare()
    ConfigStore.instance().store(group="schema", name=config_name, node=cls, provider="dflash_mcmc")
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        composed, choices = _compose(config_name, overrides)
        return to_typed(composed, cls), choices


def compose_checked(config_name: str, overrides: list[str]) -> DictConfig:
    """Hydra's compose; what goes wrong is a UserError that names field, value and what is allowed."""
    return _compose(config_name, overrides)[0]


def _compose(config_name: str, overrides: list[str]) -> tuple[DictConfig, dict[str, str]]:
    """The configuration, and the option chosen in each group. Raises UserError."""
    try:
        composed = compose(config_name, overrides, return_hydra_config=True)
        choices = OmegaConf.to_container(composed.hydra.runtime.choices)
        with open_dict(composed):
            del composed["hydra"]
        OmegaConf.resolve(composed)
        return composed, choices
    except _OF_COMPOSING as error:
        raise _explain(error, config_name, overrides) from error


def _parse(arguments: list[str]) -> Namespace:
    parser = get_args_parser()
    parser.error = _refuse_flag
    parsed = parser.parse_args(arguments)
    extra = [f"hydra.searchpath=['file://{Path(parsed.config_dir).resolve()}']"] if parsed.config_dir else []
    parsed.overrides = extra + parsed.overrides
    return parsed


def _refuse_flag(message: str) -> NoReturn:
    raise UserError(f"{message}; allowed: group=option, field=value, and the flags that --hydra-help lists")


def _parse_override(text: str) -> Override:
    try:
        return OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()).parse_override(text)
    except HydraException as error:
        raise UserError(f"cannot read {text!r}; allowed: field=value, such as sampler.alpha=2") from error


def _hydra(overrides: list[Override]) -> DictConfig:
    """Hydra's own configuration, as its sweeper will see it. Raises UserError."""
    texts = [deferred(override) for override in overrides]
    try:
        return GlobalHydra.instance().hydra.compose_config("config", texts, RunMode.MULTIRUN, from_shell=False,
                                                           validate_sweep_overrides=False).hydra
    except _OF_COMPOSING as error:
        single = [override.input_line for override in overrides if not override.is_sweep_override()]
        raise _explain(error, "config", single) from error


def _launcher(hydra: DictConfig, overrides: list[Override]) -> Slurm | None:
    """What hydra/launcher=slurm asks for. Raises UserError."""
    if hydra.runtime.choices.get("hydra/launcher") != "slurm":
        return None
    for override in overrides:
        if override.get_key_element().startswith((PREFIX, "hydra/launcher")) and override.is_sweep_override():
            raise UserError(f"{override.get_key_element()}: given several values, {override.input_line.partition('=')[2]}; "
                            "allowed: one, for all jobs")
    return to_launcher(hydra.launcher)


def _sweep(hydra: DictConfig, asked_for: bool) -> Sweep | None:
    """The sweep that `-m` or conf/sweep asks for."""
    if not asked_for and hydra.mode != RunMode.MULTIRUN:
        return None
    sweeper = hydra.sweeper
    direction = sweeper.get("direction", "maximize")
    if getattr(direction, "name", direction) != "maximize":  # an enumeration, whose first value is minimize
        raise ConfigError("hydra.sweeper.direction", getattr(direction, "name", direction), "maximize, with every objective")
    params = tuple(f"{name}={values}" for name, values in (sweeper.get("params") or {}).items())
    return Sweep(params, sweeper.get("n_trials"))


def _jobs(overrides: list[Override], sweep: Sweep | None) -> list[list[str]]:
    """The overrides of every job of a sweep, or those of the one job."""
    if sweep is not None:
        return list(points([*map(_parse_override, sweep.params), *overrides], sweep))
    for override in overrides:
        if override.is_sweep_override():
            values = override.input_line.partition("=")[2]
            raise UserError(f"{override.key_or_group}: given several values, {values}; allowed: one, or a sweep: -m before "
                            "the overrides")
    return [[override.input_line for override in overrides]]


def _explain(error: Exception, config_name: str, overrides: list[str]) -> UserError:
    """One line for what Hydra and OmegaConf tell in several."""
    texts, cause = [], error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(texts)
    if found := re.search(r"Key '(\w+)' not in 'BasicLauncherConf'", text):
        return UserError(f"{PREFIX}{found[1]}: is a field of hydra/launcher=slurm, which is not chosen; allowed: "
                         "hydra/launcher=slurm, or a hardware that chooses it, such as hardware=slurm_gpu")
    for pattern, explain in (
        (r"Could not override '([^']+)'\.?\s*No match in the defaults list", _unknown_group),
        (r"Could not find '([^']+)'", _unknown_option),
        (r"Could not load '([^']+)'", _unknown_option),
        (r"Error resolving interpolation '([^']+)'", _group_left_out),
        (r"Could not override '([^']+)'", _unknown_key),
        (r"Error merging override (\S.*)", _wrong_value),
    ):
        found = re.search(pattern, text)
        if found:
            return explain(found.group(1).strip("'. "), config_name, overrides)
    if "Config group override must be a string" in text:
        name = next((_key(text) for text in overrides if text.endswith("=null")), "the command line")
        return UserError(f"{name}: given null for a group; allowed: one of its options, or leave it out")
    return UserError(" ".join(str(error).split()))


def _unknown_group(name: str, config_name: str, overrides: list[str]) -> UserError:
    return unknown_field(name, sorted({*_options(), *Config.__dataclass_fields__}))


def _unknown_option(name: str, config_name: str, overrides: list[str]) -> UserError:
    group, _, option = name.rpartition("/")
    if group.startswith("hydra/"):
        hint = "; for optuna: pip install 'dflash_mcmc[sweep]'" if name == "hydra/sweeper/optuna" else ""
        known = GlobalHydra.instance().config_loader().get_group_options(group)
        return UserError(f"{group}: {option!r} is not installed; allowed: {', '.join(known)}{hint}")
    folders = [config_folder(), *(Path(part) for text in overrides if text.startswith("hydra.searchpath=")
                                  for part in re.findall(r"file://([^']+)", text))]
    known = sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})
    return UserError(f"{group}: unknown option {option!r}{did_you_mean(option, known)}; allowed: {', '.join(known)}")


def _group_left_out(interpolation: str, config_name: str, overrides: list[str]) -> UserError:
    name = next((text[1:] for text in overrides if text.startswith("~") and text[1:] in interpolation), interpolation)
    return UserError(f"{name}: not given; allowed: an option of the group, {name}=...")


def _unknown_key(name: str, config_name: str, overrides: list[str]) -> UserError:
    name = name.lstrip("+~")
    composed = _without(name, config_name, overrides)
    parent = name.rpartition(".")[0]
    while parent and OmegaConf.select(composed, parent) is None:
        name, parent = parent, parent.rpartition(".")[0]
    node = OmegaConf.select(composed, parent) if parent else composed
    known = [str(key) for key in node if key != "hydra"] if OmegaConf.is_dict(node) else []
    if not parent and config_name == "config":
        known = sorted({*known, *_options()})
    return unknown_field(name, known, _elsewhere(name, composed))


def _elsewhere(name: str, composed: DictConfig) -> list[str]:
    """Where a field of that name is: in groups of this configuration, and in options of the group that are not chosen."""
    group, _, last = name.rpartition(".")
    if not group:
        return [f"{key}.{last}" for key, node in composed.items() if OmegaConf.is_dict(node) and last in node]
    return [f"{group}={option}" for option, found in components(group).items()
            if last in found.cls.__dataclass_fields__] if group in GROUPS else []


def _wrong_value(text: str, config_name: str, overrides: list[str]) -> UserError:
    name, _, value = text.lstrip("+~").partition("=")
    composed = _without(name, config_name, overrides)
    found = field_of(name, composed)
    spec = spec_of(found[0]) if found and has_spec(found[0]) else None
    return ConfigError(name, value, spec.describe(found[1]) if spec else "another type")


def _without(name: str, config_name: str, overrides: list[str]) -> DictConfig:
    """What the other overrides compose, without those that are wrong too."""
    of_hydra = name.startswith("hydra")
    others = [text for text in overrides if _key(text) != name]
    try:
        return compose(config_name, others, return_hydra_config=of_hydra)
    except _OF_COMPOSING:
        kept, composed = [], compose(config_name, [], return_hydra_config=of_hydra)
    for text in sorted(others, key=lambda text: "." in _key(text)):  # options before the fields that they bring
        with contextlib.suppress(*_OF_COMPOSING):
            composed = compose(config_name, [*kept, text], return_hydra_config=of_hydra)
            kept.append(text)
    return composed


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
