"""Components that a Python program chooses: by the name of an option, or as objects; a loaded model; a request's sampler."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from dflash_mcmc.config.checks import checked
from dflash_mcmc.config.command import compose_once
from dflash_mcmc.config.mistakes import unknown_argument
from dflash_mcmc.config.overrides import quoted
from dflash_mcmc.config.schema import Condition, Config
from dflash_mcmc.dataset.inputs.conversations import Conversation
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean
from dflash_mcmc.fields import check_bounds, identity_values
from dflash_mcmc.model import Model
from dflash_mcmc.options import option_files
from dflash_mcmc.process.turns import Turn
from dflash_mcmc.registry import GROUPS, components, name_of

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.sampler import Sampler

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_MOST = 256
_OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0}
_turns: WeakKeyDictionary[Any, Turn] = WeakKeyDictionary()
_listing = threading.Lock()

_ARGUMENTS = {"dataset.max_new_tokens": "max_new_tokens", "dataset.stop": "stop", "model.path": "model", "model.chat": "chat"}


@contextmanager
def named_by_argument() -> Iterator[None]:
    """A context in which errors name the arguments of the Python interface in place of the fields that they set."""
    try:
        yield
    except UserError as error:
        error.args = (re.sub("|".join(map(re.escape, _ARGUMENTS)), lambda match: _ARGUMENTS[match[0]], str(error)),)
        raise


def known_only(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """The function, with one line for a keyword that it does not have: what does the same here, such as for `temperature`."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    @functools.wraps(function)
    def called(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if unknown := [name for name in kwargs if name not in known]:
            raise unknown_argument(unknown[0], kwargs[unknown[0]], known)
        return function(*args, **kwargs)
    return called


def component(group: str, name: str, **fields: Any) -> Any:
    """The component of an option, with what `conf/<group>/<name>.yaml` changes in its defaults, and with the given fields.

    An option that has the name of its component gives what the class's constructor gives: `component("sampler", "power_mh")`
    equals `dflash_mcmc.PowerMH()`. Other options are presets of a component, such as `component("model", "tiny")`.

    Args:
        group: a group of components, such as "sampler", "blend", "decoder", "draft" or "model".
        name: an option of the group: `python -m dflash_mcmc --help` lists them.
        fields: values of fields; `python -m dflash_mcmc --help GROUP` lists them.

    Raises:
        UserError: for an unknown option or field, or a value out of bounds, with the message of the command line.
    """
    if group not in GROUPS:
        raise UserError(f"unknown group {group!r}{did_you_mean(group, GROUPS)}; allowed: {', '.join(GROUPS)}")
    given = [override(f"{group}.{field}", value) for field, value in fields.items()]
    return getattr(compose_once("config", [f"{group}={name}", *given], Config)[0], group)


def configuration(chosen: Mapping[str, Any], values: Mapping[str, Any]) -> Config:
    """The configuration with the chosen components, which is not checked as a whole yet. Raises UserError.

    Args:
        chosen: by group, an object, the name of an option, or None for the option in `conf/config.yaml`. A sampler may be the
            name of a condition, which is a sampler and a blend.
        values: values of fields by dotted name.
    """
    conditions = option_files()["condition"].keys() - components("sampler").keys()
    named = [override("condition" if group == "sampler" and choice in conditions else group, choice)
             for group, choice in chosen.items() if isinstance(choice, str)]
    overrides = ["tracker=none", *named, *(override(field, value) for field, value in values.items())]
    config, _ = compose_once("config", overrides, Config)
    for group, choice in chosen.items():
        if choice is not None and not isinstance(choice, str):
            if not is_component(group, choice):
                raise ConfigError(group, choice, f"a component of the group, or one of {', '.join(components(group))}")
            check_bounds(choice, f"{group}.")  # its fields may have been set after it was made
            setattr(config, group, choice)
    return config


def is_component(group: str, value: object) -> bool:
    """Whether a value is a component of the group."""
    return any(type(value) is registered.cls for registered in components(group).values())


def override(field: str, value: Any) -> str:
    """A value as the command line writes it."""
    return f"{field}={_written(value)}"


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_written(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, (str, Path)):
        return quoted(str(value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class Samplers:
    """Makes the configurations of requests, and keeps the latest.

    Args:
        config: the configuration as it was composed; it is not changed.
        max_width: most operations that a chain may ask for together.
        max_steps: largest `num_steps` that a request may give, unless the server's own sampler has more.
    """

    def __init__(self, config: Config, max_width: int, max_steps: int):
        self._config, self._max_width, self._max_steps = copy.deepcopy(config), max_width, max_steps
        self._config.condition = Condition(name=None, sampler=None, blend=None)
        self._has_draft = config.sampler.needs_draft or config.blend.needs_draft
        self._own_steps = _steps(config)
        self._made: dict[str, Config] = {}
        self._lock = threading.Lock()

    def config_for(self, fields: Mapping[str, Any], common: Mapping[str, float], max_tokens: int) -> Config:
        """The checked configuration of a request. Raises ConfigError, and UserError for what does not fit together.

        Args:
            fields: of the sampler, and `name` for another sampler.
            common: values of the fields that requests of every server have: temperature, top_p, top_k, and penalties.
            max_tokens: longest answer.
        """
        key = json.dumps([fields, common, max_tokens], sort_keys=True)
        with self._lock:
            if key not in self._made:
                while len(self._made) >= _MOST:
                    self._made.pop(next(iter(self._made)))
                self._made[key] = self._checked(self._sampler(fields, common), max_tokens)
            return self._made[key]

    def adapted(self, fields: Mapping[str, Any], common: Mapping[str, float],
                policy: str) -> tuple[Mapping[str, Any], dict[str, float], dict[str, float]]:
        """The fields and the common fields of a request, and what of it is ignored, by `serve.client_temperature`."""
        sampler = fields.get("name", name_of(self._config.sampler))
        registered = components("sampler").get(sampler)
        cls = registered and registered.cls
        lacks = [name for name in ("temperature", "top_p") if name in common and cls and _lacks(cls, name, common[name])]
        if common.get("temperature") == 0.0 and cls and "temperature" in _names(cls) and sampler != "temperature":
            lacks.append("temperature")  # no value of theirs: their temperature is that of a proposal
        if policy == "refuse" or not lacks:
            return fields, dict(common), {}
        kept, ignored = {name: common[name] for name in common if name not in lacks}, {name: common[name] for name in lacks}
        if policy == "proposal" and "temperature" in lacks and "proposal_temperature" in _names(cls):
            fields = {"proposal_temperature": ignored.pop("temperature"), **fields}
        return fields, kept, ignored

    def _checked(self, sampler: Sampler, max_tokens: int) -> Config:
        config = copy.deepcopy(self._config)
        config.sampler, config.dataset.max_new_tokens = sampler, max_tokens
        config = checked(config)
        if config.sampler.needs_draft and not self._has_draft:
            raise ConfigError("sampler", name_of(sampler), "one without a draft, or this sampler from the start")
        if (width := config.sampler.width()) > self._max_width:
            raise ConfigError("sampler", f"a sampler that draws {width} sequences together", f"at most {self._max_width} "
                              "(serve.max_width)")
        steps = _steps(config)
        if steps > (most := max(self._max_steps, self._own_steps)):
            raise ConfigError("sampler.num_steps", steps, f"at most {most} (serve.max_steps, or the server's own)")
        return config

    def _sampler(self, asked: Mapping[str, Any], common: Mapping[str, float]) -> Sampler:
        """The sampler with the fields of the request, among them the common ones that it has. Raises ConfigError."""
        base, fields = self._config.sampler, {name: value for name, value in asked.items() if name != "name"}
        options, own = components("sampler"), name_of(base)
        name = asked.get("name", own)
        if name not in options:
            raise ConfigError("sampler", name, f"one of {', '.join(options)}{did_you_mean(name, options)}")
        cls = options[name].cls
        if common.get("temperature") == 0.0 and name == "temperature":
            if name == own and base.law().has_penalty:
                raise ConfigError("temperature", 0.0, "a number > 0 with this server's penalties, which sampler=greedy lacks")
            cls, name = options["greedy"].cls, "greedy"
        if "self" in fields:  # Python's own argument of every constructor
            raise ConfigError("sampler.self", fields["self"], f"fields of sampler={name}: {', '.join(sorted(_names(cls)))}")
        if "function" in fields:  # its file would be run here, for anybody who can reach the server
            raise ConfigError("sampler.function", fields["function"], "nothing in a request: the server's command gives it")
        defaults = {field: getattr(base, field) for field in _names(cls)} if name == own else {}
        # The common fields that the sampler has
        shared: dict[str, float] = {}
        for field, value in common.items():
            if field in fields and fields[field] != value:
                raise ConfigError(field, value, f"nothing, since sampler.{field} is given")
            if field in _names(cls):
                shared[field] = value
            elif _lacks(cls, field, value):
                raise ConfigError(field, value,
                                  f"{_off(cls, field):g} with sampler={name}, which has no such field; its fields, in "
                                  f"sampler: {', '.join(sorted(_names(cls)))}")
        return cls(**{**defaults, **fields, **shared})


def _off(cls: Any, field: str) -> float:
    return 0.0 if cls.is_deterministic and field == "temperature" else _OFF[field]


def _lacks(cls: Any, field: str, value: float) -> bool:
    """Whether a common field would change the law of a sampler that does not have it."""
    return (field not in _names(cls) and value != _off(cls, field)
            and not (cls.is_deterministic and field in ("top_p", "top_k", "min_p")))


def _steps(config: Config) -> int:
    """The Metropolis-Hastings steps of a stage; 0 for a sampler without steps."""
    return cast("int", identity_values(config.sampler).get("num_steps", 0))


def _names(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


@dataclass(slots=True)
class LoadedModel(Model):
    """The component of the group `model` for a model that is loaded already."""

    target: LanguageModel
    chat: bool

    def num_layers(self) -> int:
        return len(self.target.layers)

    def load(self, device: str) -> LanguageModel:
        return self.target

    def tokenizer(self) -> Any:
        return self.target.tokenizer

    def render(self, tokenizer: Any, conversation: Conversation) -> str:
        if not self.chat:
            return conversation.as_text()
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("chat", True, "False, since the tokenizer has no chat template")
        return conversation.with_template(tokenizer, False, self.date)


def model_of(model: Any, tokenizer: Any, chat: bool) -> Model:
    """The component of the group `model` for what a user gives. Raises ConfigError. No weights are read."""
    if isinstance(model, (str, Path)) or is_component("model", model):
        if tokenizer is not None:
            raise ConfigError("tokenizer", type(tokenizer).__name__, "None with a folder, a hub name or a component")
        if not isinstance(model, (str, Path)):
            return model
        is_option = str(model) in option_files()["model"]
        return component("model", str(model), chat=chat) if is_option else component("model", "hf", path=str(model), chat=chat)
    if not callable(getattr(model, "get_output_embeddings", None)):
        raise ConfigError("model", model, "a causal language model of transformers, a folder, a hub name or a component")
    if tokenizer is None:
        raise ConfigError("tokenizer", None, "the tokenizer of a loaded model")
    from dflash_mcmc.engine.batching.language_model import LanguageModel

    with turn_of(model.base_model).taken(nests=False), evaluating(model):
        return LoadedModel(LanguageModel(model, tokenizer), chat)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """A context in which a loaded model is in evaluation mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def turn_of(resource: object) -> Turn:
    """The turns of what one run at a time can use, such as the decoder of a model."""
    with _listing:
        return _turns.setdefault(resource, Turn())
