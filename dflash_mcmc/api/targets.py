"""Targets from Python: a model that the user has loaded, or one in files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dflash_mcmc.api.choices import component, is_component
from dflash_mcmc.dataset.inputs.conversations import Conversation
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.model import Model
from dflash_mcmc.process.turns import Turn

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.language_model import LanguageModel


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
        return conversation.with_template(tokenizer, enable_thinking=False)


def model_of(model: Any, tokenizer: Any, chat: bool) -> Model:
    """The component of the group `model` for what a user gives. Raises ConfigError. No weights are read."""
    if isinstance(model, (str, Path)) or is_component("model", model):
        if tokenizer is not None:
            raise ConfigError("tokenizer", type(tokenizer).__name__, "None with a folder, a hub name or a component")
        return component("model", "hf", path=str(model), chat=chat) if isinstance(model, (str, Path)) else model
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


_turns: WeakKeyDictionary[Any, Turn] = WeakKeyDictionary()
_listing = threading.Lock()


def turn_of(resource: object) -> Turn:
    """The turns of what one run at a time can use, such as the decoder of a model."""
    with _listing:
        return _turns.setdefault(resource, Turn())
