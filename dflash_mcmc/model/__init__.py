"""Targets: any transformers causal language model, and the embedded one; another model beside one, for a blend or draft."""

import re
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from omegaconf import OmegaConf

from dflash_mcmc.components import MISSING, Component, Settings, identity, registered, runtime
from dflash_mcmc.dataset.inputs.conversations import DATE, Conversation
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.model.files import Files
from dflash_mcmc.options import option_files
from dflash_mcmc.tokenizer import PromptEncoder

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching import language_model, plan


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

    def shape(self, device: str) -> "plan.TargetShape | None":
        """The attributes that are known without loading the model; None if there are none. Raises UserError."""
        return None

    def prompt_encoder(self) -> PromptEncoder | None:
        """The encoder of prompts before the model is loaded; None if its configuration is not here. Raises UserError."""
        return None

    def num_parameters(self) -> int | None:
        """Stored parameters of the checkpoint; None if they are not known without loading it. Raises ConfigError."""
        return None

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
    def load(self, device: str) -> "language_model.LanguageModel":
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


@dataclass(kw_only=True)
class ModelBeside:
    """Base class of components with a second model, beside the base class of their group. Fields: where that model is."""

    __slots__ = ()

    group: ClassVar[str]

    model: str = runtime(MISSING, "the other model, as model= takes it: a folder, a hub name, or an option of model; its "
                         "content is part of the identity, but its location is not")
    revision: str | None = identity(None, "commit, tag or branch of a hub name; null takes the newest")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = identity(
        None, "precision of the other model; auto = the checkpoint's own; null = that of the option, else auto")

    def check(self, config: Settings) -> None:
        """Checks that the model is there. Raises ConfigError."""
        with self.named():
            self._component(config).check(config)

    def resolved(self, config: Settings) -> Self:
        """The component with the folder or hub name, and the precision, of an option of `model`."""
        component: Any = self._component(config)
        dtype = self.dtype if component.dtype == "auto" else component.dtype
        return replace(self, model=component.path, revision=component.revision, dtype=dtype)

    def canonical(self, config: Settings) -> dict[str, object]:
        """The revision is null, because the identity has the hash of the content. So is `auto`, which null is by now."""
        return {"revision": None, "dtype": None if self.dtype == "auto" else self.dtype}

    def fingerprint(self) -> str:
        """Hash of the other model's content."""
        with self.named():
            return self.component().fingerprint()

    def load_beside(self, target: "language_model.LanguageModel") -> "language_model.LanguageModel":
        """The other model on the target's device. It stays loaded. Raises UserError if it does not fit the target."""
        self._compare(target.tokenizer)
        with self.named():
            loaded: language_model.LanguageModel = self.component().load_beside(str(target.device), self._field)
        if not bool(target.forbidden[loaded.vocab_size :].all()):
            raise ConfigError(self._field, self.model, "a model whose head has a row for each of the target's tokens (it "
                              f"has {loaded.vocab_size})")
        if loaded.recurrent_nets:
            raise ConfigError(self._field, self.model, "a model without recurrent layers, whose states do not follow the "
                              "target's rows")
        return loaded

    def shape_beside(self, device: str) -> "plan.TargetShape | None":
        """Its config.json; None for a hub name that is not in the cache yet. Raises UserError."""
        with self.named():
            return self.component().shape(device)

    def check_model(self, model: Model) -> None:
        """Compares the tokenizers. Raises UserError."""
        self._compare(model.tokenizer())

    def component(self) -> Any:
        """The component of the group `model` for a folder or a hub name."""
        return registered("model")["hf"].cls(path=self.model, revision=self.revision, dtype=self.dtype or "auto")

    @property
    def _field(self) -> str:
        return f"{self.group}.model"

    def _compare(self, own: Any) -> None:
        """Raises ConfigError unless the other model has the target's tokens under the same ids. Heads may have more rows.

        The target's tokenizer makes all ids, so that nothing else of the other tokenizer matters.
        """
        with self.named():
            mine, theirs = own.get_vocab(), self.component().tokenizer().get_vocab()
        differing = sorted({token_id for _, token_id in mine.items() ^ theirs.items()})
        if differing:
            there, here = (next((repr(token[:30]) for token, own_id in vocabulary.items() if own_id == differing[0]), "none")
                           for vocabulary in (theirs, mine))
            raise ConfigError(self._field, self.model, f"a model with the target's tokenizer (its token {differing[0]} is "
                              f"{there}, and the target's is {here}; {len(differing)} of {len(mine)} differ)")

    def _component(self, config: Settings) -> Any:
        """The component of the group `model` for what is given. Raises ConfigError."""
        if self.model not in option_files()["model"] or self.model in registered("model"):
            return self.component()
        root = {"paths": asdict(config.paths), "model": _fields(self.model)}
        resolved: Any = OmegaConf.to_container(OmegaConf.create(root), resolve=True)
        overrides = {name: value for name, value in (("revision", self.revision), ("dtype", self.dtype)) if value is not None}
        return registered("model")["hf"].cls(**resolved["model"] | overrides)

    @contextmanager
    def named(self) -> Iterator[None]:
        """A context in which the errors of a model name this component's fields."""
        try:
            yield
        except UserError as error:
            line = str(error).replace("model.path", self._field)
            error.args = (re.sub(r"\bmodel\.(revision|dtype)\b", rf"{self.group}.\1", line),)
            raise


def _fields(option: str) -> dict[str, Any]:
    """The fields that an option of `model` and the options that it extends set, with interpolations."""
    file = option_files()["model"][option]
    own: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.suffix == ".yaml" else {"defaults": []}
    extended = [_fields(parent) for parent in own.pop("defaults") if isinstance(parent, str)]
    return {name: value for fields in (*extended, own) for name, value in fields.items()}
