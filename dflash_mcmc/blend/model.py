"""Model blend: mixes a share of another causal language model's logits into the target's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from omegaconf import OmegaConf

from dflash_mcmc.blend import LogitsBlend
from dflash_mcmc.config.help import option_files
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.fields import MISSING, identity, runtime
from dflash_mcmc.registry import components, register

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.batching.plan import TargetShape
    from dflash_mcmc.model import Model

_FIELDS = {"path": "blend.model", "revision": "blend.revision", "dtype": "blend.dtype"}


@register("blend", "model")
@dataclass(slots=True, kw_only=True)
class ModelBlend(LogitsBlend):
    """logits = (1 - beta) * target + beta * other, where `other` is a second model with the same tokenizer.

    beta below 0 is contrastive decoding with an amateur, in the form of O'Brien and Lewis (arXiv 2309.09117); beta above 0 is
    an ensemble. `alpha_mask` is the plausibility constraint of Li et al. (arXiv 2210.15097, section 3.3). The other model
    reads the same tokens, so its logits are a function of the prefix, and the blend is a law for every sampler.
    """

    model: str = runtime(MISSING, "the other model, as model= takes it: a folder, a hub name, or an option of model; its "
                         "content is part of the identity, but its location is not")
    revision: str | None = identity(None, "commit, tag or branch of a hub name; null takes the newest")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = identity(
        None, "precision of the other model; auto = the checkpoint's own; null = that of the option, else auto")

    presets = ("contrastive",)
    needs_companion = True

    def check(self, config: Config) -> None:
        """Checks that the model is there; see `LogitsBlend.check`. Raises ConfigError."""
        with _named():
            self._component(config).check(config)
        LogitsBlend.check(self, config)

    def resolved(self, config: Config) -> ModelBlend:
        """The blend with the folder or hub name, and the precision, of an option of `model`."""
        found = self._component(config)
        dtype = self.dtype if found.dtype == "auto" else found.dtype
        return dataclasses.replace(self, model=found.path, revision=found.revision, dtype=dtype)

    def canonical(self, config: Config) -> dict[str, object]:
        """The revision is null, because the identity has the hash of the content. So is `auto`, which null is by now."""
        return {"revision": None, "dtype": None if self.dtype == "auto" else self.dtype}

    def fingerprint(self) -> str:
        """Hash of the other model's content."""
        with _named():
            return self._model().fingerprint()

    def companion(self, target: LanguageModel) -> LanguageModel:
        """The other model on the target's device. It stays loaded. Raises UserError if its tokenizer is another."""
        self._compare(target.tokenizer)
        with _named():
            loaded: LanguageModel = self._model().load_beside(str(target.device))
        if not bool(target.forbidden[loaded.vocab_size :].all()):
            raise ConfigError("blend.model", self.model, "a model whose head has a row for each of the target's tokens (it "
                              f"has {loaded.vocab_size})")
        if loaded.recurrent_nets:
            raise ConfigError("blend.model", self.model, "a model without recurrent layers, whose states do not follow the "
                              "target's rows")
        return loaded

    def companion_shape(self, target: TargetShape) -> TargetShape | None:
        """Its config.json; None for a hub name that is not in the cache yet. Raises UserError."""
        with _named():
            return self._model().shape(target.device.type)

    def check_model(self, model: Model) -> None:
        """Compares the tokenizers. Raises UserError."""
        self._compare(model.tokenizer())

    def _compare(self, own: Any) -> None:
        """Raises ConfigError unless the other model has the target's tokens under the same ids. Heads may have more rows.

        The target's tokenizer makes all ids, so that nothing else of the other tokenizer matters.
        """
        with _named():
            mine, theirs = own.get_vocab(), self._model().tokenizer().get_vocab()
        differing = sorted({number for _, number in mine.items() ^ theirs.items()})
        if differing:
            there, here = (_token(differing[0], vocabulary) for vocabulary in (theirs, mine))
            raise ConfigError("blend.model", self.model, f"a model with the target's tokenizer (its token {differing[0]} is "
                              f"{there}, and the target's is {here}; {len(differing)} of {len(mine)} differ)")

    def _component(self, config: Config) -> Any:
        """The component of the group `model` for what is given. Raises ConfigError."""
        if self.model not in option_files()["model"] or self.model in components("model"):
            return self._model()
        root = {"paths": dataclasses.asdict(config.paths), "model": _fields(self.model)}
        resolved: Any = OmegaConf.to_container(OmegaConf.create(root), resolve=True)
        given = {name: value for name, value in (("revision", self.revision), ("dtype", self.dtype)) if value is not None}
        return components("model")["hf"].cls(**resolved["model"] | given)

    def _model(self) -> Any:
        """The component for a folder or a hub name."""
        return components("model")["hf"].cls(path=self.model, revision=self.revision, dtype=self.dtype or "auto")


def _fields(option: str) -> dict[str, Any]:
    """The fields that an option of `model` and the options that it extends set, with interpolations."""
    own: Any = OmegaConf.to_container(OmegaConf.load(option_files()["model"][option]))
    extended = [_fields(parent) for parent in own.pop("defaults") if isinstance(parent, str)]
    return {name: value for fields in (*extended, own) for name, value in fields.items()}


def _token(number: int, vocabulary: Mapping[str, int]) -> str:
    """A token for an error."""
    found = next((token for token, place in vocabulary.items() if place == number), None)
    return "none" if found is None else repr(found[:30])


@contextmanager
def _named() -> Iterator[None]:
    """A context in which the errors of a model name the blend's field."""
    try:
        yield
    except UserError as error:
        error.args = (re.sub(r"\bmodel\.(path|revision|dtype)\b", lambda found: _FIELDS[found[1]], str(error)),)
        raise
