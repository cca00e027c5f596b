"""Composes configurations with Hydra: once for all jobs that choose the same options. Fields are set on a copy of the result.

A field cannot change which files are composed. A sweep over fields alone, such as alpha by beta, is therefore composed once.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dflash_mcmc.components import GROUPS
from dflash_mcmc.config import mistakes
from dflash_mcmc.config.mistakes import SEARCH_PATH
from dflash_mcmc.config.overrides import OF_PATHS, choices_for, given_value, looks_like_path, readable, text_of, with_null
from dflash_mcmc.errors import UserError

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
                raise mistakes.unreadable(text) from error
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
            raise mistakes.other(error) from error
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
            mistakes.check_choices([override for override in choosing if override.key_or_group != SEARCH_PATH])
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
            if mistake := mistakes.of_choices(error, options):
                raise mistake from error
            # Hydra's error names no override. The mistake is the one without which the others compose.
            for override in choosing:
                others = [other for other in choosing if other is not override]
                try:
                    choices = composed(others).hydra.runtime.choices
                except _ERRORS:
                    continue
                if override.is_delete() and override.key_or_group in choices:
                    raise mistakes.left_out(override.key_or_group) from error
                if override.get_key_element().lstrip("+~") not in choices:
                    raise mistakes.unknown_group(override) from error
            raise mistakes.other(error) from error

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
            raise mistakes.unknown_group(override)
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
            elif type(value) in (int, float) and mistakes.is_boolean(key, composed):  # for OmegaConf every number is a truth
                raise mistakes.wrong_value(override, composed)
            else:
                OmegaConf.update(composed, key, value, merge=present is not None,  # OmegaConf cannot merge into null
                                 force_add=override.is_add() or override.is_force_add())
        except (ConfigAttributeError, ConfigKeyError) as error:
            raise mistakes.unknown_key(override, composed, self.root) from error
        except OmegaConfBaseException as error:
            raise mistakes.wrong_value(override, composed) from error


def _fields_of(composed: DictConfig, node: str) -> list[str]:
    """The names of the fields below a node, including those without a value; none if there is no such node."""
    parent = OmegaConf.select(composed, node)
    return [str(name) for name in parent.keys()] if OmegaConf.is_dict(parent) else []  # noqa: SIM118  (a node is no dict)
