"""A component: its fields, the name under which it is registered, and what it may ask of the run that it is a part of.

Every field of every component is either `identity` (it can change an output and is part of the run's identity) or `runtime`
(it changes how, where or how much is computed, but no output). A test fails on a field that is neither.

`@register(group, name)` makes a slotted dataclass the option `<group>=<name>`, and the schema of options that extend it. One
name is used in three places: `sampler=power_mh`, `dflash_mcmc/sampler/power_mh.py` and `tests/sampler/test_power_mh.py`.
Another installed package adds components through the entry-point group `dflash_mcmc.plugins`: each entry point names a module
that calls `register`.

`Settings` is what a component may ask. `config.schema.Config` has all of it. No component knows the root or the class of
another group.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import json
import math
import numbers
import os
import pkgutil
import types
import typing
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from omegaconf import MISSING as MISSING

from dflash_mcmc.errors import ConfigError, UserError, did_you_mean

T = TypeVar("T")
ROLES = ("identity", "runtime")
_WORDS: dict[object, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false",
                             Any: "a word or a list of words", list[str]: "a list of texts (['A','B'])",
                             list[int]: "a list of whole numbers ([1,2])", list[float]: "a list of numbers ([0.5,1])"}


class Spec(NamedTuple):
    """The metadata of a field. Bounds apply to numbers and to every number of a list, `choices` to strings.

    The choices come from the field's type, `Literal["a", "b"]` (`schema_of`).
    """

    role: str
    help: str
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] | None = None
    inverse_of: str = ""
    """The field whose inverse this one takes where it is null. A value that is this inverse is shown as `1/<that field>`,
    because it varies only with it."""
    at_zero: str = ""
    """The override that does what a 0 would mean, for a number whose bounds exclude 0."""
    later: bool = False
    """Whether the identity leaves the field out at its default, as that of runs that are older than the field."""
    no_effect: bool = False
    """Whether the field changes nothing at any value. The points of a sweep over it are one run."""

    def describe(self, field_type: object) -> str:
        """The allowed values in words: `a number > 0`, `one of 'A', 'B'`, `a whole number or null`."""
        inner, optional = _strip_optional(field_type)
        if self.choices:
            return "one of " + ", ".join(repr(choice) for choice in self.choices) + (" or null" if optional else "")
        words = _WORDS.get(inner, "a list")
        each = ", each" if typing.get_origin(inner) is list else ""
        bounds = [f"{sign} {bound:{'d' if isinstance(bound, int) else 'g'}}" for sign, bound in
                  ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le)) if bound is not None]
        zero = f"; in place of 0: {self.at_zero}" if self.at_zero else ""
        return words + (f"{each} " + " and ".join(bounds) if bounds else "") + (" or null" if optional else "") + zero

    def admits(self, value: object) -> bool:
        """Whether a value of the right type is within the bounds or among the choices."""
        if value is None:
            return True
        if isinstance(value, (list, tuple)):
            return all(self.admits(entry) for entry in value)
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True
        return not (
            (isinstance(value, float) and not math.isfinite(value))
            or (self.gt is not None and not value > self.gt) or (self.ge is not None and not value >= self.ge)
            or (self.lt is not None and not value < self.lt) or (self.le is not None and not value <= self.le)
        )


def identity(default: T, help: str, **bounds: Any) -> T:
    """A field that can change an output.

    Args:
        default: the value where none is given; MISSING if one must be given.
        help: its meaning, for users.
        bounds: further values of Spec.
    """
    return _field(default, Spec("identity", help, **bounds))


def runtime(default: T, help: str, **bounds: Any) -> T:
    """A field that changes where, how fast or how much is computed, and no output except by rounding."""
    return _field(default, Spec("runtime", help, **bounds))


def _field(default: Any, spec: Spec) -> Any:
    """A dataclass field. Each object gets a list of its own."""
    if isinstance(default, list):
        return dataclasses.field(default_factory=functools.partial(list, default), metadata={"spec": spec})
    return dataclasses.field(default=default, metadata={"spec": spec})


def default_of(field: dataclasses.Field) -> Any:
    """The value of a field where none is given; MISSING if one must be given."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def shown_default(field: dataclasses.Field) -> str:
    """The default of a field in one line, as a command line takes it: `4.0`, `null`, `[1, 2]`; `needed` if there is none."""
    default = default_of(field)
    if default == MISSING:
        return "needed"
    text = json.dumps(default) if not isinstance(default, str) else default
    return text if text and "\n" not in text else json.dumps(text[:40] + "..." if text else "")


def schema_of(cls: type[T]) -> type[T]:
    """The dataclass as OmegaConf can hold it, which knows no `Literal`: a field's literals become the choices of its Spec.

    The annotation is a plain text from then on. Editors and type checkers read the source, and see the literals.
    """
    bases = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
    for base in reversed(bases):
        schema_of(base)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        # A field that only replaces a default, `max_new_tokens: int = 512`, has the Spec of the base class's field.
        inherited = [base.__dataclass_fields__[field.name] for base in bases if field.name in base.__dataclass_fields__]
        if inherited and not has_spec(field):
            field.metadata = inherited[0].metadata  # type: ignore[misc]
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            schema_of(hint)  # type: ignore[arg-type]
        plain, literals = _without_literals(hint)
        if literals:
            owner = next(base for base in cls.__mro__ if field.name in vars(base).get("__annotations__", {}))
            owner.__annotations__[field.name] = plain
            field.metadata = types.MappingProxyType({"spec": spec_of(field)._replace(choices=literals)})  # type: ignore[misc]
    return cls


def _without_literals(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """A type with `str` in place of its `Literal`, and the literals."""
    inner, optional = _strip_optional(hint)
    if typing.get_origin(inner) is typing.Literal:
        return (str | None if optional else str), typing.get_args(inner)
    if typing.get_origin(inner) is list and typing.get_origin(typing.get_args(inner)[0]) is typing.Literal:
        return list[str], typing.get_args(typing.get_args(inner)[0])
    return hint, ()


def spec_of(field: dataclasses.Field) -> Spec:
    """The Spec of a field that was declared by `identity` or `runtime`."""
    return field.metadata["spec"]


@cache
def specs_of(cls: Any) -> dict[str, Spec]:
    """The Specs of a component's fields by name, in their order."""
    return {field.name: spec_of(field) for field in dataclasses.fields(cls)}


def has_spec(field: dataclasses.Field) -> bool:
    """Whether a field was declared by `identity` or `runtime`. Fields that hold a component or a group have no Spec."""
    return "spec" in field.metadata


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, object, object]]:
    """(dotted name, field, declared type, value) of every leaf field below a component or the whole Config."""
    kind: Any = type(node)  # mypy does not take a class for hashable
    types = types_of(kind)
    for field in dataclasses.fields(node):
        value, name = getattr(node, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from walk(value, name + ".")
        else:
            yield name, field, types[field.name], value


@cache
def types_of(cls: type) -> dict[str, object]:
    """The declared types of a class's fields. A command line asks for them thousands of times."""
    return typing.get_type_hints(cls)


def takes_null(cls: Any, name: str) -> bool:
    """Whether null is a value of a field; elsewhere an identity has null where the field changes nothing."""
    return _strip_optional(types_of(cls).get(name))[1]


def identity_values(node: Any) -> dict[str, object]:
    """The values of the identity fields by dotted name."""
    return {name: value for name, field, _, value in walk(node) if (spec := spec_of(field)).role == "identity"
            and not (spec.later and value == default_of(field))}


def values_of(cls: Any, given: Mapping[str, object], prefix: str) -> dict[str, object]:
    """The given values of fields of a dataclass, each of its type and within its bounds, for its constructor.

    Args:
        given: the values of some fields.
        prefix: what precedes a field's name in errors.

    Raises:
        ConfigError: for an unknown field, a value that is not allowed, and a field that has no value.
    """
    specs, types = specs_of(cls), types_of(cls)
    for name, value in given.items():
        if name not in specs:
            raise ConfigError(f"{prefix}{name}", value, f"a field of {cls.__name__}{did_you_mean(name, specs)}: "
                              f"{', '.join(specs) or 'it has none'}")
    values: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        name, spec, value = field.name, spec_of(field), given.get(field.name, MISSING)
        if name not in given:
            if default_of(field) != MISSING:
                continue
            raise ConfigError(f"{prefix}{name}", "nothing", spec.describe(types[name]))
        try:
            values[name] = value = _converted(value, types[name])
        except TypeError as error:
            raise ConfigError(f"{prefix}{name}", value, spec.describe(types[name])) from error
        if not spec.admits(value):
            raise ConfigError(f"{prefix}{name}", value, spec.describe(types[name]))
    return values


def check_types(cls: Any, recorded: object, prefix: str) -> None:
    """Raises ConfigError for a recorded value whose type is not its field's.

    Null is taken for any field: it has no effect there.
    """
    if not isinstance(recorded, Mapping):
        raise ConfigError(prefix.rstrip("."), recorded, f"the fields of {cls.__name__}")
    for field in dataclasses.fields(cls):
        kind, value = _without_literals(types_of(cls)[field.name])[0], recorded.get(field.name)
        if value is not None and dataclasses.is_dataclass(kind):
            check_types(kind, value, f"{prefix}{field.name}.")
        elif value is not None and _strip_optional(kind)[0] in _WORDS:  # not the types of a user's component
            try:
                _converted(value, kind)
            except TypeError as error:
                raise ConfigError(f"{prefix}{field.name}", value, spec_of(field).describe(kind)) from error


def restored(cls: type[T], values: Mapping[str, object]) -> T:
    """An object of a dataclass with recorded values, which are not checked."""
    bare = object.__new__(cls)
    for name, value in values.items():
        setattr(bare, name, value)
    return bare


def _converted(value: Any, field_type: object) -> object:
    """A value as a field of this type holds it: whole numbers become floats, tuples lists, and paths texts.

    Raises TypeError for a value of another type.
    """
    inner, optional = _strip_optional(field_type)
    if inner is Any or type(value) is inner or (value is None and optional):
        return value
    if typing.get_origin(inner) is list and isinstance(value, (list, tuple)):
        return [_converted(entry, typing.get_args(inner)[0]) for entry in value]
    if inner is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    if inner is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if inner is str and isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    raise TypeError(f"{value!r} is no {inner}")


def check_bounds(node: object, prefix: str = "") -> None:
    """Raises ConfigError for the first field out of its bounds."""
    for name, field, field_type, value in walk(node, prefix):
        if has_spec(field) and not spec_of(field).admits(value):
            raise ConfigError(name, value, spec_of(field).describe(field_type))


@cache
def _strip_optional(field_type: object) -> tuple[object, bool]:
    arguments = typing.get_args(field_type)
    if type(None) in arguments:
        return next(a for a in arguments if a is not type(None)), True
    return field_type, False


@dataclass(slots=True, kw_only=True)
class Assumed:
    """Assumptions of an estimate (`runner/plan.py`), which draws nothing."""

    prompt_length: int = runtime(100, "mean length of a prompt in tokens", ge=1)
    answer_length: float = runtime(0.6, "mean length of an answer, as a share of dataset.max_new_tokens", gt=0, le=1)
    acceptance: float = runtime(0.5, "share of the proposals' tokens that are in accepted proposals", ge=0, le=1)
    abandoned_at: float = runtime(0.5, "share of a rejected proposal that is drawn before early rejection stops it", ge=0,
                                  le=1)
    identical: float = runtime(0.3, "share of the tokens to draw that a proposal shares with the state", ge=0, le=1)
    shared: float = runtime(0.94, "share of the tokens in probe=speculative_mcmc's drawn blocks that belong to a common "
                            "prefix, evaluated once for several blocks", ge=0, le=1)
    kept: float = runtime(4.0, "tokens that sample and match keeps of each block in probe=sampled_verify, the target's own "
                          "included", ge=1)


class Settings(Protocol):
    """One run. Each group is an object of its base class, such as `Sampler`. Components do not import those of others."""

    name: str
    seed: int
    num_chains: int
    dry_run: bool
    assumed: Assumed
    paths: Any
    model: Any
    draft: Any
    blend: Any
    sampler: Any
    potential: Any
    decoder: Any
    probe: Any
    dataset: Any
    grader: Any
    hardware: Any
    engine: Any


def groups_of(config: Settings) -> tuple[str, ...]:
    """The groups that the outputs depend on, for the probe or for samples."""
    blend = ("blend",) if config.probe.reads_blend and not config.blend.is_null else ()
    sources = config.probe.sources()
    potential = ("potential",) if "sampler" in sources and not config.potential.is_null else ()
    return (*sources, *blend, *potential, *(("engine",) if config.engine.rounds_otherwise else ()))


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


C = TypeVar("C", bound=type[Component])

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


def register(group: str, name: str) -> Callable[[C], C]:
    """Class decorator for a dataclass with slots that inherits the group's base class.

    The constructor raises ConfigError for what the command line refuses. Raises TypeError for any other class. A dataclass
    without slots would silently accept unknown keys.
    """

    def add(cls: C) -> C:
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
        from hydra.core.config_store import ConfigStore

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


def registered(group: str) -> dict[str, Registration]:
    """The registered components of a group, by name."""
    load_all()
    return {name: option for (its_group, name), option in sorted(_components.items()) if its_group == group}


def classes() -> dict[str, type[Any]]:
    """The classes of all components by their own names, such as `PowerMH`."""
    load_all()
    return {option.cls.__name__: option.cls for option in _components.values()}


def name_of(component: object) -> str:
    """The name under which the class of this object is registered."""
    return next(option.name for option in _components.values() if option.cls is type(component))


def options_with(group: str, attribute: str) -> str:
    """The options of a group for which a class attribute is true, in words for errors: `a, b or c`."""
    options = [option for name, found in registered(group).items() if getattr(found.cls, attribute)
               for option in (*found.cls.presets, name)]
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
