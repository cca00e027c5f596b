"""Drafts: components that propose tokens. Each loads a drafter of `engine/speculative/drafter.py`."""

import importlib
import json
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from dflash_mcmc.components import MISSING, Component, Settings, identity, name_of, options_with, runtime
from dflash_mcmc.errors import ConfigError, note
from dflash_mcmc.model import Model
from dflash_mcmc.model.files import Checkpoint, precision_name

if TYPE_CHECKING:
    from dflash_mcmc.draft.network.checkpoint import Family
    from dflash_mcmc.engine.batching import language_model, plan
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter, Drafter


class Draft(Component):
    """Base class of drafts. A subclass defines `load`."""

    __slots__ = ()

    group = "draft"
    has_density: ClassVar[bool] = True
    """Whether the draft samples its tokens from a law, and therefore has a probability for each token."""
    reads_features: ClassVar[bool] = False
    """Whether one forward, from the target's features, gives logits for a whole block."""
    is_source: ClassVar[bool] = False
    """Whether samplers can draw from it, without a decoder."""
    has_model: ClassVar[bool] = False
    """Whether a causal language model drafts, token by token."""

    def num_parameters(self) -> int | None:
        """Stored parameters, without the target's; None if they are not known without loading the draft. Raises UserError."""
        return 0

    @abstractmethod
    def load(self, target: "language_model.LanguageModel") -> "Drafter | None":
        """The drafter on the target's device; None for no draft. Raises UserError if draft and target do not fit."""

    def check_target(self, target: "plan.TargetShape") -> None:
        """Checks, without loading weights, that the draft fits a target. Raises UserError."""

    def check_model(self, model: Model) -> None:
        """Checks, without loading weights, that tokens mean the same to draft and target. Raises UserError."""

    def reduces(self) -> bool:
        """Whether its law gives some tokens of the target probability 0; False before a checkpoint's download."""
        return False

    def size(self) -> "plan.DraftSize | None":
        """The sizes that an engine's memory plan needs; None without a draft, or before its download. Raises UserError."""
        return None


@dataclass(kw_only=True)
class CheckpointDraft(Draft):
    """Base class of drafts in a checkpoint with DFlash's layout. Without a `load` of its own a draft goes slot by slot."""

    __slots__ = ()

    path: str = runtime(MISSING, "folder of a checkpoint, or a hub name; its content is part of the identity, but its "
                        "location is not")
    revision: str | None = identity(None, "commit, tag or branch of a hub name; null takes the newest")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = identity(
        "auto", "precision of the draft's weights and activations; auto = the checkpoint's own")

    has_block_network: ClassVar[bool] = True
    """Whether one forward of the network serves a block, as DFlash's does."""
    example: ClassVar[str]
    """A hub name, for errors."""

    def family(self) -> "Family":
        """The kind of network: `FAMILY` of the file in `draft/network` with the draft's name."""
        return importlib.import_module(f"dflash_mcmc.draft.network.{name_of(self)}").FAMILY

    def block_tokens(self, shape: Any) -> int:
        """Drafted tokens of a block, for the shape of the checkpoint. Raises UserError for a block that is too large."""
        return shape.num_drafted

    def check(self, config: Settings) -> None:
        """Checks that the checkpoint exists and fits the block, without loading it. Raises UserError."""
        self._checkpoint().check()
        if self._checkpoint().folder.is_dir():
            self.block_tokens(self._shape(self._checkpoint().folder))

    def canonical(self, config: Settings) -> dict[str, object]:
        """The fields as the identity has them: null and auto are replaced by their actual values.

        `revision` is null, because the identity has the hash of the content.
        """
        if not self._checkpoint().folder.is_dir():
            return {"revision": None}
        stored = precision_name(self._shape(self._checkpoint().folder).dtype)
        return {"revision": None, "dtype": stored if self.dtype == "auto" else self.dtype}

    def fingerprint(self) -> str:
        """Hash of the checkpoint's content; see `Checkpoint.fingerprint`."""
        return self._checkpoint().fingerprint()

    def check_target(self, target: "plan.TargetShape") -> None:
        """Checks both config.json against each other, and the tensors that a folder has. Raises UserError."""
        from dflash_mcmc.draft.network.checkpoint import check_pair, check_tensors

        folder = self._checkpoint().config_folder()
        if folder is None:
            note(f"draft.path: config.json of {self.path} is not in the cache, so that it is not compared with the target's "
                 "before it is loaded")
            return
        shape = self._shape(folder)
        self.block_tokens(shape)
        check_pair(shape, hidden_size=target.config.hidden_size, vocab_size=target.vocab_size, num_layers=target.num_layers)
        if self._checkpoint().folder.is_dir():  # a cache may hold the configuration alone
            check_tensors(folder, self.family())

    def size(self) -> "plan.DraftSize | None":
        """Block and cache of the draft; None for a hub name that is not in the cache yet. Raises UserError."""
        import torch

        from dflash_mcmc.engine.batching import cache, plan

        folder = self._checkpoint().config_folder()
        if folder is None:
            return None
        shape = self._shape(folder)
        dtype = shape.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        return plan.DraftSize(self.block_tokens(shape), cache.CacheShape(
            shape.num_layers, shape.num_key_heads, shape.head_dim, shape.head_dim, dtype))

    def num_parameters(self) -> int | None:
        return self._checkpoint().num_parameters()

    def reduces(self) -> bool:
        folder = self._checkpoint().config_folder()
        return folder is not None and self._shape(folder).draft_vocab_size is not None

    def load(self, target: "language_model.LanguageModel") -> "Drafter | None":
        from dflash_mcmc.engine.speculative.drafter import SlotwiseDrafter

        return SlotwiseDrafter(self.network(target), target)

    def training_record(self) -> dict[str, Any]:
        """`training` of config.json, which `python -m dflash_mcmc.train` writes; empty without it. Raises UserError."""
        folder = self._checkpoint().local()
        self._shape(folder)  # finds a config.json that cannot be read
        record = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("training")
        return record if isinstance(record, dict) else {}

    def network(self, target: "language_model.LanguageModel") -> Any:
        """The network with its weights, on the target's device. Raises UserError if draft and target do not fit.

        On a CPU its linear layers are replaced (`linear.py`), and have no gradients.
        """
        from dflash_mcmc.draft.network.checkpoint import EMBEDDING, HEAD, check_copies, check_pair

        folder, family = self._checkpoint().local(), self.family()
        shape = self._shape(folder)
        self.block_tokens(shape)
        check_pair(shape, hidden_size=target.config.hidden_size, vocab_size=target.vocab_size, num_layers=len(target.layers))
        copies = {EMBEDDING: target.decoder.get_input_embeddings().weight, HEAD: target.head.weight}
        if shape.draft_vocab_size or not self.has_block_network:  # the head is the network's own
            del copies[HEAD]
        check_copies(folder, copies)
        return _network(str(folder), self.dtype, str(target.device), family)

    def _shape(self, folder: Path) -> Any:
        """Raises UserError for a config that is not of this kind."""
        return self.family().read_shape(folder)

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint("draft.path", self.path, self.revision, self.example)


@lru_cache(maxsize=1)
def _network(folder: str, dtype: str, device: str, family: "Family") -> Any:
    import torch

    from dflash_mcmc.draft.network import checkpoint
    from dflash_mcmc.engine.batching import linear

    network = checkpoint.load(Path(folder), None if dtype == "auto" else getattr(torch, dtype), device, family)
    linear.replace_layers(network)
    return network


def check_source(config: Settings, user: str, instead: str = "") -> None:
    """Checks that blocks can be drawn from the draft alone, by laws that depend on the sequence alone. Raises ConfigError.

    Args:
        instead: for a user whose law is wrong unless every token can be drawn: what the user may be instead.
    """
    if instead and config.draft.reduces():
        raise ConfigError("draft", name_of(config.draft), f"a draft with all tokens of the target with {user}, or {instead}: "
                          "sequences with a token that this draft lacks would never be proposed")
    if not config.draft.is_source:
        able = options_with("draft", "is_source")
        raise ConfigError("draft", name_of(config.draft), f"{able} with {user}, which draws whole blocks from the draft")


def check_features(config: Settings, user: str) -> None:
    """Checks that the draft reads the target's features and gives logits for a whole block. Raises ConfigError."""
    if config.draft.reduces():
        raise ConfigError("draft", name_of(config.draft), f"a draft with all tokens of the target with {user}")
    if not config.draft.reads_features:
        able = options_with("draft", "reads_features")
        raise ConfigError("draft", name_of(config.draft), f"{able} with {user}, which needs logits for a whole block from one "
                          "forward on the target's features")


def load_feature_drafter(config: Settings, target: "language_model.LanguageModel") -> "DFlashDrafter":
    """Loads the draft that `check_features` has accepted. Raises UserError if it does not fit the target."""
    drafter = cast("DFlashDrafter", config.draft.load(target))
    check_features(config, f"probe={name_of(config.probe)}")  # again, since its files may not have been here before
    return drafter
