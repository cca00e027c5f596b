"""`@register(group, name)`: a slotted dataclass becomes the typed schema of `conf/<group>/<name>.yaml`.

One word, four places: `sampler=power_mh` is `conf/sampler/power_mh.yaml`, `dflash_mcmc/sampler/power_mh.py` and
`tests/sampler/test_power_mh.py`. A package installed beside this one adds components through the entry-point group
`dflash_mcmc.plugins`: each entry point names a module that calls `register`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from hydra.core.config_store import ConfigStore

from dflash_mcmc.errors import UserError

T = TypeVar("T", bound=type)

GROUPS = ("model", "draft", "blend", "sampler", "decoder", "probe", "dataset", "grader", "hardware", "tracker")
_components: dict[tuple[str, str], Component] = {}


class Component(NamedTuple):
    """A registered dataclass."""

    group: str
    name: str
    cls: type
    summary: str
    """First line of the class docstring."""
    file: str
    line: int


def register(group: str, name: str) -> Callable[[T], T]:
    """Class decorator. The class is a dataclass with slots (a slotless one would take unknown keys silently)."""

    def add(cls: T) -> T:
        if group not in GROUPS:
            raise TypeError(f"register({group!r}, {name!r}): the groups are {', '.join(GROUPS)}")
        if not dataclasses.is_dataclass(cls) or "__slots__" not in vars(cls):
            raise TypeError(f"{cls.__qualname__}: use @dataclass(slots=True, kw_only=True)")
        known = _components.get((group, name))
        # The class is made twice where a module runs as `__main__` and is imported as well.
        if known is not None and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{group}={name} is already registered by {known.cls.__module__}")
        doc = inspect.getdoc(cls) or ""
        _, line = inspect.getsourcelines(cls)
        _components[group, name] = Component(group, name, cls, doc.split("\n")[0], inspect.getsourcefile(cls), line)
        ConfigStore.instance().store(group=f"schema/{group}", name=name, node=cls, provider="dflash_mcmc")
        return cls

    return add


def components(group: str) -> dict[str, Component]:
    """The registered components of a group, by name."""
    load_all()
    return {name: component for (its_group, name), component in sorted(_components.items()) if its_group == group}


def name_of(component: object) -> str:
    """The name under which the class of this object is registered."""
    return next(known.name for known in _components.values() if known.cls is type(component))


def load_all() -> None:
    """Imports every leaf and plugin, which registers it. Raises UserError for a plugin that cannot be imported.

    Leaves import heavy libraries only where they use them.
    """
    for group in GROUPS:
        package = importlib.import_module(f"dflash_mcmc.{group}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"dflash_mcmc.{group}.{module.name}")
    for entry_point in importlib.metadata.entry_points(group="dflash_mcmc.plugins"):
        try:
            entry_point.load()
        except Exception as error:  # another package's code: whatever it raises, its name is what helps
            raise UserError(f"the plugin {entry_point.name!r} ({entry_point.value}) cannot be loaded: "
                            f"{type(error).__name__}: {error}") from error
