"""`@register(group, name)`: a slotted dataclass becomes the option `<group>=<name>`, and the schema of options that extend it.

One name is used in three places: `sampler=power_mh`, `dflash_mcmc/sampler/power_mh.py` and
`tests/sampler/test_power_mh.py`. Another installed package adds components through the entry-point group
`dflash_mcmc.plugins`: each entry point names a module that calls `register`.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import pkgutil
from abc import ABC
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from hydra.core.config_store import ConfigStore

from dflash_mcmc.errors import UserError
from dflash_mcmc.fields import MISSING, default_of, schema_of, values_of
from dflash_mcmc.settings import Settings


class Need(NamedTuple):
    """A value of a part of the run that a component needs. `config/schema.py` refuses any other."""

    of: str
    """`GROUP.ATTRIBUTE`: a field of the chosen component, or an attribute of its class, such as `decoder.is_null`."""
    value: object = True
    given: str = ""
    """The component's own `FIELD=VALUE` that needs it, or a FIELD that is not null; empty for the component as a whole."""
    why: str = ""
    """What follows the component's name in the error."""


class Component(ABC):
    """A part of a run that the configuration chooses. A leaf is a dataclass that inherits its group's base class.

    The methods are hooks: a leaf overrides those that it needs. They load no model.
    """

    __slots__ = ()

    group: ClassVar[str]
    """Group of the configuration: `sampler`, `blend`, ..."""
    presets: ClassVar[tuple[str, ...]] = ()
    """Options of the group, besides the component's own name, that configure this component."""
    is_null: ClassVar[bool] = False
    """Whether this choice means that the group is not used (`none`, `plain`). Labels and folders leave it out."""
    needs_draft: ClassVar[bool] = False
    """Whether the component cannot work without a draft."""
    takes_draft: ClassVar[bool] = False
    """Whether the component uses a draft where one is configured."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """Values of the run's parts without which the component does not work."""

    def check(self, config: Settings) -> None:  # noqa: B027 - a hook: most components have no such condition
        """Checks conditions that span fields or components. Raises UserError."""

    def resolved(self, config: Settings) -> Self:
        """The component with automatic values, such as null or auto, replaced by their actual values."""
        return self

    def canonical(self, config: Settings) -> dict[str, object]:
        """Values that replace the component's own in the identity: effective values, and None for a field without effect."""
        return {}

    def fingerprint(self) -> str | None:
        """A hash of the content that the component reads, as part of the identity; None without such content."""
        return None


T = TypeVar("T", bound=type[Component])

PLUGINS = "dflash_mcmc.plugins"
"""The group of entry points of plugins."""
GROUPS = ("model", "draft", "blend", "sampler", "potential", "decoder", "probe", "dataset", "grader", "hardware", "engine",
          "tracker")
ROOMS = {"grader": "grading"}
"""The packages of groups whose room has another name than the group."""
_components: "dict[tuple[str, str], Registration]" = {}


class Registration(NamedTuple):
    """A registered component."""

    group: str
    name: str
    cls: type[Any]
    """The dataclass, a subclass of the group's base class."""
    summary: str
    """First line of the class docstring."""

    @property
    def file(self) -> str:
        """The file that defines the class."""
        return inspect.getsourcefile(self.cls) or ""

    @property
    def line(self) -> int:
        """The line of the class in its file. Finding it takes milliseconds, because Python parses the file."""
        return inspect.getsourcelines(self.cls)[1]


def register(group: str, name: str) -> Callable[[T], T]:
    """Class decorator for a dataclass with slots that inherits the group's base class.

    The constructor raises ConfigError for what the command line refuses. Raises TypeError for any other class. A dataclass
    without slots would silently accept unknown keys.
    """

    def add(cls: T) -> T:
        if group not in GROUPS:
            raise TypeError(f"register({group!r}, {name!r}): the groups are {', '.join(GROUPS)}")
        if not dataclasses.is_dataclass(cls) or "__slots__" not in vars(cls):
            raise TypeError(f"{cls.__qualname__}: use @dataclass(slots=True, kw_only=True)")
        if not issubclass(cls, Component) or cls.group != group:
            raise TypeError(f"{group}={name}: {cls.__qualname__} must inherit dflash_mcmc.{ROOMS.get(group, group)}."
                            f"{group.capitalize()}")
        _own_super(cls)
        schema_of(cls)
        existing = _components.get((group, name))
        # A module that runs as `__main__` and is also imported defines the class twice.
        if existing is not None and (existing.cls.__module__, existing.cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{group}={name} is already registered by {existing.cls.__module__}")
        doc = inspect.getdoc(cls) or ""
        _components[group, name] = Registration(group, name, cls, doc.split("\n")[0])
        ConfigStore.instance().store(group=f"schema/{group}", name=name, node=cls, provider="dflash_mcmc")
        own = cls.__init__

        @functools.wraps(own)
        def init(self: Any, **given: Any) -> None:  # Python callers are refused what the command line refuses
            own(self, **values_of(cls, given, f"{group}."))

        cls.__init__ = init  # type: ignore[misc]
        defaults = {field: default_of(field) for field in dataclasses.fields(cls)}
        cls.__signature__ = inspect.Signature([  # type: ignore[attr-defined]  # for `help` and editors
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, annotation=field.type,
                              default=inspect.Parameter.empty if default == MISSING else default)
            for field, default in defaults.items()])
        return cls

    return add


def _own_super(cls: type[Any]) -> None:
    """Lets `super()` work in a class with slots and its bases. `dataclass` copies a class, and its methods name the original.

    Python 3.14 does this itself.
    """
    for owner in filter(dataclasses.is_dataclass, cls.__mro__):
        for member in vars(owner).values():
            function: Any = member.fget if isinstance(member, property) else member
            names = getattr(getattr(function, "__code__", None), "co_freevars", ())
            if "__class__" in names:
                function.__closure__[names.index("__class__")].cell_contents = owner


def components(group: str) -> dict[str, Registration]:
    """The registered components of a group, by name."""
    load_all()
    return {name: registered for (its_group, name), registered in sorted(_components.items()) if its_group == group}


def classes() -> dict[str, type[Any]]:
    """The classes of all components by their own names, such as `PowerMH`."""
    load_all()
    return {registered.cls.__name__: registered.cls for registered in _components.values()}


def name_of(component: object) -> str:
    """The name under which the class of this object is registered."""
    return next(registered.name for registered in _components.values() if registered.cls is type(component))


def options_with(group: str, attribute: str) -> str:
    """The options of a group for which a class attribute is true, in words for errors: `a, b or c`."""
    options = [option for name, registered in components(group).items() if getattr(registered.cls, attribute)
               for option in (*registered.cls.presets, name)]
    return " or ".join([", ".join(options[:-1]), options[-1]] if len(options) > 1 else options)


@cache
def load_all() -> None:
    """Imports and thereby registers every leaf and plugin, once. Raises UserError for a plugin that cannot be imported.

    Leaves import heavy libraries inside the functions that use them.
    """
    for group in GROUPS:
        package = importlib.import_module(f"dflash_mcmc.{ROOMS.get(group, group)}")
        for module in pkgutil.iter_modules(package.__path__):
            if module.name != "__main__":
                importlib.import_module(f"{package.__name__}.{module.name}")
    for entry_point in importlib.metadata.entry_points(group=PLUGINS):
        try:
            entry_point.load()
        except Exception as error:  # another package's code may raise anything; the user needs the package's name
            raise UserError(f"the plugin {entry_point.name!r} ({entry_point.value}) cannot be loaded: "
                            f"{type(error).__name__}: {error}") from error
