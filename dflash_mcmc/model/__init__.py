"""Targets: any transformers causal language model, and the embedded one."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from dflash_mcmc.components import Component
from dflash_mcmc.dataset.inputs.conversations import DATE, Conversation
from dflash_mcmc.model.files import CheckpointSize, Files

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.batching.plan import TargetShape
    from dflash_mcmc.engine.batching.prompt_encoder import PromptEncoder


class Model(Component):
    """Base class of targets. A subclass defines the abstract methods and declares the field below."""

    __slots__ = ()

    group = "model"

    if TYPE_CHECKING:  # a dataclass field of the subclass
        chat: bool

    @property
    def date(self) -> str:
        """What a chat template that asks for the time is told."""
        return DATE

    @property
    def thinking(self) -> list[str] | None:
        """The opening and the closing mark of the model's thinking; None for those that are known."""
        return None

    @abstractmethod
    def num_layers(self) -> int | None:
        """Number of decoder layers; None if it is not known before the model is loaded. Raises ConfigError."""

    def shape(self, device: str) -> TargetShape | None:
        """The attributes that are known without loading the model; None if there are none. Raises UserError."""
        return None

    def prompt_encoder(self) -> PromptEncoder | None:
        """The encoder of prompts before the model is loaded; None if its configuration is not here. Raises UserError."""
        return None

    def checkpoint_size(self) -> CheckpointSize:
        """Parameters, hidden size and layers, as far as they are known without loading the model. Raises ConfigError."""
        return CheckpointSize()

    def rope_override(self) -> dict[str, Any] | None:
        """Parameters of the rotary embedding in place of the checkpoint's; None for the checkpoint's own."""
        return None

    def files(self, weights: bool = True) -> Files | None:
        """The files of the checkpoint, downloaded if necessary; None if the model is not in files. Raises UserError.

        Args:
            weights: whether the weights are needed.
        """
        return None

    def fingerprint(self, weights: bool = True) -> str | None:
        """A hash of the model's content, or of its tokenizer and configurations alone; None without files."""
        return None

    @abstractmethod
    def load(self, device: str) -> LanguageModel:
        """The model on a device, in eval mode. Raises UserError."""

    @abstractmethod
    def tokenizer(self) -> Any:
        """The tokenizer of transformers, without the model's weights. Raises UserError."""

    @abstractmethod
    def render(self, tokenizer: Any, conversation: Conversation) -> str:
        """The text that the model receives for a conversation. Raises UserError."""

    def prompt(self, tokenizer: Any, text: str) -> str:
        """The text that the model receives for a question, as the only turn of the user."""
        return self.render(tokenizer, Conversation.of(text))
