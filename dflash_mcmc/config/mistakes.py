"""One line for each mistake in a command line: the field, what was given, and what is allowed."""

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from dflash_mcmc.components import GROUPS, PLUGINS, has_spec, registered, spec_of
from dflash_mcmc.config.launcher import PREFIX
from dflash_mcmc.config.overrides import OF_PATHS, given_value, text_of
from dflash_mcmc.config.schema import Config, field_of, unknown_field
from dflash_mcmc.errors import ConfigError, UnknownName, UserError, did_you_mean, shortened
from dflash_mcmc.options import option_files

SEARCH_PATH = "hydra.searchpath"
_KNOWN_AS = {"max_tokens": "dataset.max_new_tokens", "n": "num_chains", "num_samples": "num_chains",
             "num_return_sequences": "num_chains", "batch_size": "hardware.num_slots", "num_problems": "dataset.limit",
             "num_shots": "dataset.fewshot", "num_fewshot": "dataset.fewshot", "output_dir": "paths.outputs",
             "assistant_model": "draft=model draft.model", "steps": "sampler.num_steps", "mcmc_steps": "sampler.num_steps",
             **dict.fromkeys(("num_speculative_tokens", "num_assistant_tokens", "num_draft_tokens", "gamma"),
                             "draft.num_drafted")}
"""Fields by the names that they have in other programs."""
_SWITCHES = {"do_sample": ("sampler=greedy", "sampler=temperature"), "wandb": ("tracker=none", "tracker=wandb")}
"""What other programs switch off and on, and the options for it here."""
_USUAL = ("temperature", "power_mh", "layer", "hf", "local")  # named first; alone, where a Python program gives the field


def check_choices(overrides: Sequence[Override]) -> None:
    """Raises UserError for a group of components that is left out, and for a value that is not a name."""
    for override in overrides:
        name, value = override.key_or_group, override.value()
        if override.is_delete():
            if name in GROUPS:
                raise left_out(name)
        elif not isinstance(value, str):
            given = "null" if value is None else given_value(override)
            raise UserError(f"{name}: given {given} for a group; allowed: one of its options, or no override of the group")


def check_search_path(overrides: Sequence[Override]) -> None:
    """Raises UserError for a folder of options that does not exist, which Hydra would leave out, and for another launcher."""
    for override in overrides:
        if override.key_or_group == f"{PREFIX}_target_":
            raise UserError(f"{PREFIX}_target_: given {override.value()!r}; allowed: hydra/launcher=NAME, with its fields")
        value = override.value() if override.key_or_group == SEARCH_PATH else None
        for path in value if isinstance(value, list) else ():
            scheme, _, place = str(path).rpartition("://")
            try:
                exists = find_spec(place) is not None if scheme == "pkg" else scheme in ("", "file") and Path(place).is_dir()
            except ImportError:  # of a package around it
                exists = False
            if not exists:
                raise UserError(f"{SEARCH_PATH}: given {str(path)!r}; allowed: a folder that exists, file:///FOLDER")


def check_idle(overrides: Sequence[Override], effective: Sequence[str] = ()) -> None:
    """Raises UserError for a setting of Hydra that has no effect.

    Args:
        effective: the settings that have an effect, besides the search path: names, or prefixes that end in a dot.
    """
    for override in overrides:
        if override.is_hydra_override() and not override.key_or_group.startswith((SEARCH_PATH, *effective)):
            allowed = ", ".join(f"{name}*" if name.endswith(".") else name for name in (SEARCH_PATH, *effective))
            raise UserError(f"{override.key_or_group}: given {given_value(override) or text_of(override)}, which has no "
                            f"effect here; allowed of Hydra's settings: {allowed}")


def unreadable(text: str) -> UserError:
    """The line for what is no override. The name of an option alone gives the overrides that choose it."""
    meant = [f"{group}={text}" for group, options in option_files().items() if text in options]
    return UserError(f"cannot read {shortened(repr(text))}{did_you_mean(text, (), meant)}; allowed: field=value, such as "
                     "sampler.alpha=2, or --help")


def left_out(group: str) -> UserError:
    """The line for a group that is deleted but needed."""
    return UserError(f"{group}: not given; allowed: an option of the group, {group}=...")


def of_choices(error: Exception, options: Callable[[str], list[str]]) -> UserError | None:
    """The line for an error of Hydra that names a missing option file or a field of another launcher; None for other errors.

    Args:
        options: the options of a group.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            return _unknown_option(cause.missing_cfg_file, options)
        if isinstance(cause, OmegaConfBaseException) and cause.full_key and cause.full_key.startswith(PREFIX):
            return _of_another_launcher(cause.full_key)
        cause = cause.__cause__ or cause.__context__
    return None


def _unknown_option(file: str, options: Callable[[str], list[str]]) -> UserError:
    group, _, option = file.rpartition("/") if file.startswith("hydra/") else file.partition("/")
    names = options(group)
    if group.startswith("hydra/"):
        return UserError(f"{group}: {option!r} is not installed; allowed: {', '.join(names)}")
    if group == "schema":  # an option file of a component, such as schema/sampler/NAME
        return UserError(f"{option.replace('/', '=')}: an option file extends a component that no module registers; allowed: "
                         f"an installed package whose entry point {PLUGINS!r} names the module of the component")
    more = f"; or {group}=PATH, {OF_PATHS[group]}" if group in OF_PATHS else ""
    more += f"; a hub name of one part is model=hf model.path={option}" if group == "model" else ""
    for other in {"sampler": ["condition"], "blend": ["condition"], "condition": ["sampler", "blend"]}.get(group, ()):
        if option in option_files()[other]:
            more = f"; or the {other} of this name: {other}={option}"
    return UnknownName(f"{group}: unknown option {option!r}{did_you_mean(option, names)}; allowed: {', '.join(names)}{more}")


def _of_another_launcher(name: str) -> UserError:
    return UserError(f"{name}: is a field of hydra/launcher=slurm, which is not chosen; allowed: hydra/launcher=slurm, or a "
                     "hardware that chooses it, such as hardware=slurm_gpu")


def unknown_group(override: Override) -> UserError:
    """The line for a choice in a group that the root configuration does not have."""
    return unknown_field(override.get_key_element().lstrip("+~"), sorted({*option_files(), *Config.__dataclass_fields__}))


def unknown_key(override: Override, composed: DictConfig, root: str) -> UserError:
    """The line for a field that a composed configuration does not have."""
    name = override.key_or_group
    if name.startswith(PREFIX) and composed.hydra.runtime.choices["hydra/launcher"] != "slurm":
        return _of_another_launcher(name)
    parent = name.rpartition(".")[0]
    while parent and OmegaConf.select(composed, parent) is None:
        name, parent = parent, parent.rpartition(".")[0]
    node = OmegaConf.select(composed, parent) if parent else composed
    fields = [str(key) for key in node if key != "hydra"] if OmegaConf.is_dict(node) else []
    if not parent and root == "config":
        fields = sorted({*fields, *option_files()})
    return unknown_field(name, fields, _meant(name, override, composed, fields))


def in_no_point(name: str, known: list[str]) -> UserError:
    """The line for a field of a component that no point of a sweep has; `known` are the fields of the points' options."""
    return unknown_field(name, known, list(_options_with(name)))


def _meant(name: str, override: Override, composed: DictConfig, fields: Sequence[str]) -> list[str]:
    """Overrides that do what a field of that name does: in a group of this configuration, else with another option."""
    group, _, last = name.rpartition(".")
    own = group if _options_with(name) else ""
    if group and not own and get_close_matches(last, fields, 1, 0.8):  # a slip of the pen
        return []
    found = {f"{option} {each}.{last}": field for each in ([own] if own else composed) if each in GROUPS
             for option, field in _options_with(f"{each}.{last}").items()}
    if override.value() == 0 and (instead := {spec_of(field).at_zero for field in found.values()} - {""}):
        return sorted(instead)
    fixed = [each for each in GROUPS if OmegaConf.select(composed, f"condition.{each}") is not None]  # to the chosen option
    near = [f"{own}.{key}" for key in composed[own] if str(key).endswith(f"_{last}")] if own in fixed else []
    if last in _SWITCHES:
        return [_SWITCHES[last][bool(override.value())]]
    if last == "name" and group in GROUPS:
        return [f"{group}={given_value(override)}"]
    known = _KNOWN_AS.get(last, "")
    node = OmegaConf.select(composed, known.rpartition(".")[0]) if "." in known else composed
    here = near if own else [known] if "=" in known or (known and known.rpartition(".")[2] in node) else [
        *([last] if last in composed else []),
        *(f"{key!s}.{last}" for key, node in composed.items_ex(resolve=False) if OmegaConf.is_dict(node) and last in node)]
    without = f" without condition={OmegaConf.select(composed, 'condition.name')}"
    return [f"{each}={given_value(override)}{without * (each.partition('=')[0] in fixed)}" for each in here or found]


def _options_with(name: str) -> dict[str, Field]:
    """The options of a field's group that have the field, and the field in each."""
    group, _, last = name.rpartition(".")
    fields = {option: each.cls.__dataclass_fields__ for option, each in registered(group).items()} if group in GROUPS else {}
    having = sorted((each for each in fields if last in fields[each]), key=lambda each: (each != last, each not in _USUAL))
    return {f"{group}={option}": fields[option][last] for option in having}


def unknown_argument(name: str, value: object, known: Collection[str]) -> UserError:
    """The line for an argument that a function of the Python interface does not have; `known` are those that it has."""
    last, given = _KNOWN_AS.get(name, name).rpartition(".")[2], shortened(repr(value))
    found = {each: field for group in GROUPS if group in known for each, field in _options_with(f"{group}.{last}").items()}
    meant = [f"{last}={given}"] if last in known else []
    for choice in [] if meant else ([each for each in found if each.partition("=")[2] in _USUAL] or list(found))[:3]:
        group, _, option = choice.partition("=")
        arguments = inspect.signature(cls := registered(group)[option].cls).parameters
        needed = [f"{each}=..." for each in arguments if arguments[each].default is inspect.Parameter.empty and each != last]
        meant.append(f"{group}=dm.{cls.__name__}({', '.join([*needed, f'{last}={given}'])})")
    if given in ("0", "0.0") and (instead := {spec_of(field).at_zero for field in found.values()} - {""}):
        meant = [f"{group}={option!r}" for group, _, option in (each.partition("=") for each in instead)]
    unknown = UnknownName(f"{name}: unknown argument{did_you_mean(name, known)}; allowed: {', '.join(known)}")
    return ConfigError(name, value, " or ".join(meant)) if meant else unknown


def is_boolean(name: str, composed: DictConfig) -> bool:
    """Whether a field with a dotted name is true or false."""
    return (field_of(name, composed) or (None, None))[1] in (bool, bool | None)


def wrong_value(override: Override, composed: DictConfig) -> UserError:
    """The line for a value whose type is not the field's."""
    name = override.key_or_group
    declared = field_of(name, composed)
    if declared is None:
        return ConfigError(name, given_value(override), "another type")
    field, field_type = declared
    if has_spec(field):
        braces = ", with \\${ in place of ${" if "${" in given_value(override) else ""
        return ConfigError(name, given_value(override), spec_of(field).describe(field_type) + braces)
    node = OmegaConf.select(composed, name)
    fields = [f"{name}.{key}" for key in node] if OmegaConf.is_dict(node) else []
    return ConfigError(name, given_value(override), f"values of its fields: {', '.join(fields)}")


def other(error: Exception) -> UserError:
    """The line for everything else that Hydra or OmegaConf complain about."""
    if isinstance(error, InterpolationResolutionError) and error.full_key:
        return UserError(f"{error.full_key}: has ${{...}}, which stands for another field ({str(error).splitlines()[0]}); "
                         "allowed: the name of a field in it, or \\${...} for the text itself")
    return UserError(" ".join(str(error).split()))
