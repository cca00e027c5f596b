"""Components that a Python program chooses: by the name of an option, or as objects; a loaded model."""

import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from dflash_mcmc.components import GROUPS, check_bounds, registered
from dflash_mcmc.config.command import compose_once
from dflash_mcmc.config.compose import quoted, unknown_argument
from dflash_mcmc.config.schema import Config
from dflash_mcmc.dataset.inputs.conversations import Conversation
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean
from dflash_mcmc.model import Model
from dflash_mcmc.options import option_files
from dflash_mcmc.process.turns import Turn

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.language_model import LanguageModel

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
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
    conditions = option_files()["condition"].keys() - registered("sampler").keys()
    named = [override("condition" if group == "sampler" and choice in conditions else group, choice)
             for group, choice in chosen.items() if isinstance(choice, str)]
    overrides = ["tracker=none", *named, *(override(field, value) for field, value in values.items())]
    config, _ = compose_once("config", overrides, Config)
    for group, choice in chosen.items():
        if choice is not None and not isinstance(choice, str):
            if not is_component(group, choice):
                raise ConfigError(group, choice, f"a component of the group, or one of {', '.join(registered(group))}")
            check_bounds(choice, f"{group}.")  # its fields may have been set after it was made
            setattr(config, group, choice)
    return config


def is_component(group: str, value: object) -> bool:
    """Whether a value is a component of the group."""
    return any(type(value) is option.cls for option in registered(group).values())


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


@dataclass(slots=True)
class LoadedModel(Model):
    """The component of the group `model` for a model that is loaded already."""

    target: "LanguageModel"
    chat: bool

    def num_layers(self) -> int:
        return len(self.target.layers)

    def load(self, device: str) -> "LanguageModel":
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
