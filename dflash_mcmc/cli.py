"""The command line: everything wrong with it is one line, and is said before anything is loaded or written."""

from __future__ import annotations

import itertools
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_mcmc.config import PACKAGE, Config, Root, field_of, store_schemas, to_config, to_typed, unknown_field, unused
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean
from dflash_mcmc.fields import spec_of
from dflash_mcmc.registry import name_of


def config_folder() -> Path:
    """`conf/` of the checkout, or the copy inside an installed package."""
    checkout = PACKAGE.parent / "conf"
    return checkout if (checkout / "config.yaml").is_file() else PACKAGE / "conf"


def prepare() -> None:
    """Registers schemas and resolvers with Hydra."""
    OmegaConf.register_new_resolver("dflash_assets", lambda: str(PACKAGE / "assets"), replace=True)
    OmegaConf.register_new_resolver("dflash_options", _list_options, replace=True)
    store_schemas()


def _list_options() -> str:
    """A line for each group: what `--help` shows."""
    groups: dict[str, list[str]] = {}
    for file in sorted(config_folder().glob("*/*.yaml")):
        groups.setdefault(file.parent.name, []).append(file.stem)
    return "\n".join(f"  {group:<11} {'  '.join(names)}" for group, names in groups.items())


def check_command(arguments: list[str]) -> None:
    """Composes and checks every job of the command line. Raises UserError, of one line.

    A sweep is checked as a whole: a mistake in its last point is told before its first one starts.
    """
    parsed = _parse(arguments)
    if any(getattr(parsed, name, None) for name in ("help", "hydra_help", "version", "shell_completion")):
        return
    for option in ("config_name", "config_path"):
        if getattr(parsed, option):
            flag = option.replace("_", "-")
            raise UserError(f"--{flag}: given {getattr(parsed, option)!r}; allowed: group=option, field=value, and a folder "
                            "of your own options with --config-dir")
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        for overrides in _jobs(parsed):
            _refuse_unused(to_config(compose_checked("config", overrides)), overrides)


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
        typed = to_typed(compose_checked(config_name, overrides), cls)
        hydra = compose(config_name, overrides, return_hydra_config=True).hydra
        return typed, OmegaConf.to_container(hydra.runtime.choices)


def compose_checked(config_name: str, overrides: list[str]) -> DictConfig:
    """Hydra's compose; what goes wrong is a UserError that names field, value and what is allowed."""
    try:
        composed = compose(config_name, overrides)
        OmegaConf.resolve(composed)
        return composed
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, OSError) as error:
        raise _explain(error, config_name, overrides) from error


def _parse(arguments: list[str]) -> Namespace:
    parsed = get_args_parser().parse_args(arguments)
    extra = [f"hydra.searchpath=['file://{Path(parsed.config_dir).resolve()}']"] if parsed.config_dir else []
    parsed.overrides = extra + parsed.overrides
    return parsed


def _jobs(parsed: Namespace) -> Iterator[list[str]]:
    """The overrides of every job of a sweep, or those of the one job."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    choices = []
    for text in parsed.overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise UserError(f"cannot read {text!r}; allowed: field=value, such as sampler.alpha=2") from error
        if override.is_sweep_override():
            if not parsed.multirun:
                raise UserError(f"{override.key_or_group}: given several values, {text.partition('=')[2]}; allowed: one, or a "
                                "sweep: -m before the overrides")
            try:
                values = list(override.sweep_string_iterator())
            except (HydraException, ValueError, TypeError, AttributeError) as error:
                raise UserError(f"cannot read {text!r}: {' '.join(str(error).split())}") from error
            choices.append([f"{override.get_key_element()}={value}" for value in values])
        else:
            choices.append([text])
    for job in itertools.product(*choices):
        yield list(job)


def _explain(error: Exception, config_name: str, overrides: list[str]) -> UserError:
    """One line for what Hydra and OmegaConf tell in several."""
    texts, cause = [], error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(texts)
    for pattern, explain in (
        (r"Could not override '([^']+)'\.?\s*No match in the defaults list", _unknown_group),
        (r"Could not find '([^']+)'", _unknown_option),
        (r"Could not load '([^']+)'", _unknown_option),
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
    known = [*(entry.name for entry in config_folder().iterdir() if entry.is_dir()), *Config.__dataclass_fields__]
    known = sorted(set(known) - {"schema"})
    return UserError(f"{name}: unknown field{did_you_mean(name, known)}; allowed: {', '.join(known)}")


def _unknown_option(name: str, config_name: str, overrides: list[str]) -> UserError:
    group, _, option = name.rpartition("/")
    folders = [config_folder(), *(Path(part) for text in overrides if text.startswith("hydra.searchpath=")
                                  for part in re.findall(r"file://([^']+)", text))]
    known = sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})
    return UserError(f"{group}: unknown option {option!r}{did_you_mean(option, known)}; allowed: {', '.join(known)}")


def _unknown_key(name: str, config_name: str, overrides: list[str]) -> UserError:
    name = name.lstrip("+~")
    composed = compose(config_name, [text for text in overrides if _key(text) != name])
    parent = name.rpartition(".")[0]
    while parent and OmegaConf.select(composed, parent) is None:
        name, parent = parent, parent.rpartition(".")[0]
    node = OmegaConf.select(composed, parent) if parent else composed
    known = [str(key) for key in node] if OmegaConf.is_dict(node) else []
    return unknown_field(name, known)


def _wrong_value(text: str, config_name: str, overrides: list[str]) -> UserError:
    name, _, value = text.lstrip("+~").partition("=")
    composed = compose(config_name, [other for other in overrides if _key(other) != name])
    found = field_of(name, composed)
    spec = spec_of(found[0]) if found else None
    return ConfigError(name, value, spec.describe(found[1]) if spec else "another type")


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
