"""Composes configurations with Hydra: reads overrides, makes a configuration of them, and says in one line what is wrong.

Options are composed once for all jobs that choose the same ones. Fields are set on a copy of the result: a field cannot change
which files are composed. A sweep over fields alone, such as alpha by beta, is therefore composed once.
"""

import copy
import inspect
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hydra import compose
from hydra._internal.utils import get_args_parser  # Hydra has no public parser of its flags; pyproject.toml bounds it
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from dflash_mcmc.components import GROUPS, PLUGINS, has_spec, registered, spec_of
from dflash_mcmc.config.schema import PREFIX, Config, field_of, unknown_field
from dflash_mcmc.errors import ConfigError, UnknownName, UserError, did_you_mean, shortened
from dflash_mcmc.options import option_files

_FIELD = re.compile(r"(?P<field>\+{0,2}(?!hydra\.)\w+(?:\.\w+)+)=(?P<text>.*[{}].*)", re.DOTALL)
"""A field of a group with braces in its value, such as `dataset.prompt={question} Answer briefly.`"""
SHOWING = ("help", "hydra_help", "shell_completion")
"""Flags of Hydra that show something without a configuration."""
OF_PATHS = {"model": "a folder, or a hub name such as Qwen/Qwen3-4B", "draft": "a folder or a hub name",
            "dataset": "a file (JSON Lines or CSV), or a hub name such as openai/gsm8k"}
"""Groups that take a path in place of an option, and what it may be."""
_DATA = (".jsonl", ".json", ".csv", ".gz")


def text_of(override: Override) -> str:
    """The whole override, such as `sampler.alpha=2`. Hydra's parser sets it, though its type allows None."""
    return override.input_line or ""


def given_value(override: Override) -> str:
    """The text after the equals sign."""
    return text_of(override).partition("=")[2]


def with_null(value: Any) -> Any:
    """A parsed value with null for None, which W&B's agent and Python write; in quotes it stays a text."""
    if isinstance(value, dict):
        return {key: with_null(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_null(each) for each in value]
    return None if type(value) is str and value == "None" else value


def quoted(text: str) -> str:
    """A text in quotes, for Hydra's grammar. The grammar reads a backslash as itself, except before a quote."""
    return '"' + re.sub(r'(\\*)("|$)', lambda quote: 2 * quote[1] + ('\\"' if quote[2] else ""), text) + '"'


def looks_like_path(value: str) -> bool:
    """Whether a value can be no name of an option: it has a slash or the suffix of data, or is a folder or file here."""
    return "/" in value or value.endswith(_DATA) or Path(value).exists()


def choices_for(group: str, path: str, written: str) -> tuple[str, str]:
    """The overrides that stand for a path, which the command line has as `written`."""
    option = option_for(group, path)
    return f"{group}={option}", f"{group}.{'model' if (group, option) == ('draft', 'model') else 'path'}={written}"


def option_for(group: str, path: str) -> str:
    """The option that takes a path: `hf`, the kind of draft that a folder's config.json names, or `jsonl` or `hub`."""
    folder = Path(path).expanduser()
    if group == "dataset":
        return "jsonl" if folder.is_file() or path.endswith(_DATA) else "hub"
    if group == "model":
        return "hf"
    described = folder / "config.json"
    text = described.read_text(encoding="utf-8", errors="replace").lower() if described.is_file() else ""
    if "dflash" not in text and "dspark" not in text:
        if "eagle3" in text or "draft_vocab_size" in text:
            return "eagle3"
        if "forcausallm" in text:
            return "model"
    return "dspark" if "dspark" in text else "dflash2" if "dflash2draftmodel" in text else "dflash"


def readable(text: str) -> str:
    """The override as Hydra's grammar can read it. An unreadable value with braces is put in quotes, as one text.

    Any other override is returned unchanged. Raises UserError for a text that is rather several: a comma without a space.
    """
    braced = _FIELD.fullmatch(text)
    if braced is None:
        return text
    with suppress(HydraException):
        OverridesParser.create().parse_override(text)
        return text
    if re.search(r",(?!\s)", braced["text"].rstrip(",")):
        field, text = braced["field"], braced["text"]
        each = ",".join(map(quoted, text.split(",")))
        raise UserError(f"{field.lstrip('+')}: given {text}; allowed: quotes around each value of a sweep, {field}='{each}', "
                        f"or around one text with commas, {field}='{quoted(text)}'")
    return f"{braced['field']}={quoted(braced['text'])}"


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """The flags and overrides of a command line. Raises UserError."""
    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]  # Hydra makes the parser, so no subclass can override it
    flags, unknown = parser.parse_known_intermixed_args(list(arguments))
    if unknown:
        name, equals, value = unknown[0].lstrip("-").partition("=")
        _refuse_flag(shortened(f"{unknown[0]}: no such flag; a field has no dashes: {name.replace('-', '_')}{equals}{value}"))
    for option in ("config_name", "config_path", "experimental_rerun"):
        if getattr(flags, option):
            raise UserError(f"--{option.replace('_', '-')}: given {getattr(flags, option)!r}; allowed: group=option, "
                            "field=value, and a folder of your own options with --config-dir")
    if flags.hydra_help and flags.overrides:
        raise UserError(f"--hydra-help: given with {shortened(' '.join(flags.overrides))}; allowed: --hydra-help alone")
    if flags.config_dir:
        if not Path(flags.config_dir).is_dir():
            raise UserError(f"--config-dir: given {flags.config_dir!r}; allowed: a folder that exists")
        flags.overrides.insert(0, f"hydra.searchpath=['file://{Path(flags.config_dir).resolve()}']")
    return flags


def _refuse_flag(message: str) -> NoReturn:
    raise UserError(f"{message}; allowed: group=option, field=value such as dataset.limit=8, --help, "
                    "and the flags that --hydra-help lists")


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


def _other(error: Exception) -> UserError:
    """The line for everything else that Hydra or OmegaConf complain about."""
    if isinstance(error, InterpolationResolutionError) and error.full_key:
        return UserError(f"{error.full_key}: has ${{...}}, which stands for another field ({str(error).splitlines()[0]}); "
                         "allowed: the name of a field in it, or \\${...} for the text itself")
    return UserError(" ".join(str(error).split()))


_ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError, OSError)
"""The errors that Hydra raises for options that it cannot compose."""


class Composed(NamedTuple):
    """The result of composing overrides."""

    values: DictConfig
    """The configuration, without Hydra's own node."""
    choices: Mapping[str, str]
    """The chosen option of each group."""
    whole: DictConfig
    """The configuration of the options alone, with Hydra's own node, in which the `hydra.*` fields are set."""


class Composer:
    """Composes configurations of one root file of `conf/`. Hydra must be initialised while a composer is used."""

    def __init__(self, root: str):
        self.root = root
        self._chosen: dict[tuple[str, ...], Composed] = {}
        """The configurations of chosen options, before any field is set."""
        self._parsed: dict[str, Override] = {}
        self._options: dict[tuple[str, str], list[str]] = {}

    def parse(self, text: str) -> Override:
        """Parses an override. Raises UserError."""
        if text not in self._parsed:
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            try:
                self._parsed[text] = parsed = parser.parse_override(readable(text))
            except HydraException as error:
                raise unreadable(text) from error
            parsed._value = with_null(parsed._value)
        return self._parsed[text]

    def overrides(self, texts: Sequence[str]) -> list[Override]:
        """The parsed overrides; a path in place of an option makes two, `model=hf model.path=FOLDER`. Raises UserError."""
        parsed = [self.parse(text) for text in texts]
        expanded: list[Override] = []
        for one in parsed:
            group, value = one.key_or_group, one.value() if one.key_or_group in OF_PATHS else None
            folder, _, option = f"{group}/{value}".rpartition("/")
            if isinstance(value, str) and looks_like_path(value) and option not in self._options_of(folder, parsed):
                expanded += map(self.parse, choices_for(group, value, given_value(one)))
            else:
                expanded.append(one)
        return expanded

    def compose(self, texts: Sequence[str]) -> Composed:
        """The configuration of overrides without swept values. Raises UserError."""
        overrides = self.overrides(texts)
        chosen = self._choose(overrides)
        composed = copy.deepcopy(chosen.values)  # other points of a sweep set other fields on the same choices
        for override in overrides:
            if not override.is_hydra_override() and not self._chooses(override, overrides):
                self._set(composed, override)
        try:
            OmegaConf.to_container(composed, resolve=True)  # values keep `\\${`, which a second reading would take for a field
        except OmegaConfBaseException as error:
            raise _other(error) from error
        return chosen._replace(values=composed)

    def choices(self, texts: Sequence[str]) -> Mapping[str, str]:
        """The option that overrides choose in each group. Raises UserError."""
        return self._choose(self.overrides(texts)).choices

    def lacking(self, texts: Sequence[str]) -> list[str]:
        """The fields of components that overrides set and that the chosen options do not have. Raises UserError."""
        overrides = self.overrides(texts)
        composed = self._choose(overrides).values
        lacking = []
        for override in overrides:
            parent, _, last = override.key_or_group.rpartition(".")
            if parent.partition(".")[0] in GROUPS and last not in _fields_of(composed, parent) and not (
                    override.is_delete() or override.is_add() or override.is_force_add()):
                lacking.append(override.key_or_group)
        return lacking

    def known_fields(self, group: str, texts: Sequence[str]) -> list[str]:
        """The fields of a group, or of a node in it, with the options that overrides choose. Raises UserError."""
        return _fields_of(self._choose(self.overrides(texts)).values, group)

    def with_hydra(self, texts: Sequence[str]) -> DictConfig:
        """The configuration of the options and of the `hydra.*` fields, with Hydra's own node. Other fields are not set.

        Raises UserError.
        """
        return copy.deepcopy(self._choose(self.overrides(texts)).whole)

    def _choose(self, overrides: Sequence[Override]) -> Composed:
        choosing = [override for override in overrides if self._chooses(override, overrides)]
        setting = [override for override in overrides if override.is_hydra_override() and override not in choosing]
        key = tuple(text_of(override) for override in (*choosing, *setting))
        if key not in self._chosen:
            check_choices([override for override in choosing if override.key_or_group != SEARCH_PATH])
            whole = self._composed(choosing)
            for override in setting:
                self._set(whole, override)
            without_hydra = copy.deepcopy(whole)
            with open_dict(without_hydra):
                del without_hydra["hydra"]
            self._chosen[key] = Composed(without_hydra, dict(whole.hydra.runtime.choices), whole)
        return self._chosen[key]

    def _composed(self, choosing: Sequence[Override]) -> DictConfig:
        """The configuration that Hydra composes from options alone. Raises UserError."""
        def composed(overrides: Sequence[Override]) -> DictConfig:
            return compose(self.root, [text_of(override) for override in overrides], return_hydra_config=True)

        def options(group: str) -> list[str]:
            return self._options_of(group, choosing)

        try:
            return composed(choosing)
        except _ERRORS as error:
            if mistake := of_choices(error, options):
                raise mistake from error
            # Hydra's error names no override. The mistake is the one without which the others compose.
            for override in choosing:
                others = [other for other in choosing if other is not override]
                try:
                    choices = composed(others).hydra.runtime.choices
                except _ERRORS:
                    continue
                if override.is_delete() and override.key_or_group in choices:
                    raise left_out(override.key_or_group) from error
                if override.get_key_element().lstrip("+~") not in choices:
                    raise unknown_group(override) from error
            raise _other(error) from error

    def _chooses(self, override: Override, overrides: Sequence[Override]) -> bool:
        """Whether an override decides which files are composed: it names an option, or a folder of options."""
        if override.key_or_group == SEARCH_PATH:
            return True
        return "." not in override.key_or_group and bool(self._options_of(override.key_or_group, overrides))

    def _options_of(self, group: str, overrides: Sequence[Override]) -> list[str]:
        """The options of a group and the groups below it; empty if the group does not exist."""
        where = [text_of(override) for override in overrides if override.key_or_group == SEARCH_PATH]
        key = (group, " ".join(where))
        if key not in self._options:
            loader = GlobalHydra.instance().config_loader()
            self._options[key] = loader.get_group_options(group, ObjectType.CONFIG, overrides=where)
        return self._options[key]

    def _set(self, composed: DictConfig, override: Override) -> None:
        """Sets, adds or deletes a field, as Hydra does. Raises UserError."""
        key, value = override.key_or_group, override.value()
        if override.package is not None:
            raise unknown_group(override)
        try:
            present = OmegaConf.select(composed, key, throw_on_missing=False)
            if override.is_delete():
                if present is None or (value is not None and value != present):
                    raise UserError(f"{key}: given {text_of(override)}; allowed: ~FIELD or ~FIELD=VALUE with the field's "
                                    "present value")
                parent, _, last = key.rpartition(".")
                with open_dict(composed):
                    del (OmegaConf.select(composed, parent) if parent else composed)[last]
            elif override.is_add() and present is not None and not isinstance(value, (dict, list)):
                raise UserError(f"{key}: {text_of(override)!r} adds a field that exists; allowed: "
                                f"{text_of(override).lstrip('+')}")
            elif type(value) in (int, float) and is_boolean(key, composed):  # for OmegaConf every number is a truth
                raise wrong_value(override, composed)
            else:
                OmegaConf.update(composed, key, value, merge=present is not None,  # OmegaConf cannot merge into null
                                 force_add=override.is_add() or override.is_force_add())
        except (ConfigAttributeError, ConfigKeyError) as error:
            raise unknown_key(override, composed, self.root) from error
        except OmegaConfBaseException as error:
            raise wrong_value(override, composed) from error


def _fields_of(composed: DictConfig, node: str) -> list[str]:
    """The names of the fields below a node, including those without a value; none if there is no such node."""
    parent = OmegaConf.select(composed, node)
    return [str(name) for name in parent.keys()] if OmegaConf.is_dict(parent) else []  # noqa: SIM118  (a node is no dict)
