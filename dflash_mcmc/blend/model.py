"""Model blend: mixes a share of another causal language model's logits into the target's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from omegaconf import OmegaConf

from dflash_mcmc.blend import Blend, Hidden
from dflash_mcmc.config.help import option_files
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.fields import MISSING, identity, runtime
from dflash_mcmc.registry import components, name_of, register

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.batching.plan import TargetShape
    from dflash_mcmc.model import Model

_FIELDS = {"path": "blend.model", "revision": "blend.revision", "dtype": "blend.dtype"}
_LONGEST = 30
"""Characters of a token in an error."""


@register("blend", "model")
@dataclass(slots=True, kw_only=True)
class ModelBlend(Blend):
    """logits = (1 - beta) * target + beta * other, where `other` is a second model with the same tokenizer.

    beta below 0 is contrastive decoding with an amateur, in the form of O'Brien and Lewis (arXiv 2309.09117); beta above 0 is
    an ensemble. `alpha_mask` is the plausibility constraint of Li et al. (arXiv 2210.15097, section 3.3). The other model
    reads the same tokens, so its logits are a function of the prefix, and the blend is a law for every sampler.
    """

    beta: float = identity(0.05, "share of the other model's logits; below 0 the blend moves away from it", ge=-10, le=1)
    model: str = runtime(MISSING, "the other model, as model= takes it: a folder, a hub name, or an option of model; its "
                         "content is part of the identity, but its location is not")
    revision: str | None = identity(None, "commit, tag or branch of a hub name; null takes the newest")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = identity(
        None, "precision of the other model; auto = the checkpoint's own; null = that of the option, else auto")
    alpha_mask: float = identity(0.0, "only tokens with at least this share of the target's largest probability can be drawn; "
                                 "0 = all tokens", ge=0, le=1)

    presets = ("contrastive",)
    needs_companion = True

    @property
    def masks(self) -> bool:  # type: ignore[override]  # only some values of `alpha_mask` mask
        """Whether tokens of the target have probability zero."""
        return self.alpha_mask > 0.0

    def check(self, config: Config) -> None:
        """Checks that the model is there, and that the sampler draws no token that the mask forbids. Raises ConfigError."""
        with _named():
            self._component(config).check(config)
        sampler = config.sampler
        if self.masks and (sampler.source() != "blended" or sampler.needs_draft):
            other = "0, or sampler.proposal=matched" if sampler.source() == "base" else "0"
            raise ConfigError("blend.alpha_mask", self.alpha_mask, f"{other} with sampler={name_of(sampler)}, which here "
                              "draws tokens without the blend: a chain could begin where the target has probability zero")

    def resolved(self, config: Config) -> ModelBlend:
        """The blend with the folder or hub name, and the precision, of an option of `model`."""
        found = self._component(config)
        dtype = self.dtype if found.dtype == "auto" else found.dtype
        return dataclasses.replace(self, model=found.path, revision=found.revision, dtype=dtype)

    def canonical(self, config: Config) -> dict[str, object]:
        """The revision is null, because the identity has the hash of the content."""
        return {"revision": None}

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

    def companion_shape(self, device: str) -> TargetShape | None:
        """Its config.json; None for a hub name that is not in the cache yet. Raises UserError."""
        with _named():
            return self._model().shape(device)

    def check_model(self, model: Model) -> None:
        """Compares the tokenizers. Raises UserError."""
        self._compare(model.tokenizer())

    def mix(self, last: Hidden, others: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden:
        """(1 - beta) * last + beta * others[0] of logits (..., vocabulary); -inf where `last` is, and where the mask forbids.

        The mask: p(x) < alpha_mask * max p of the target.
        """
        with np.errstate(invalid="ignore"):  # at -inf, which the end of this function puts back
            mixed = (1.0 - self.beta) * last + self.beta * others[0]
        allowed = last != -np.inf
        if self.masks:
            best = last.max(-1, keepdims=True) if isinstance(last, np.ndarray) else last.amax(dim=-1, keepdim=True)
            allowed &= last >= best + np.log(self.alpha_mask)
        if isinstance(mixed, np.ndarray):
            return np.where(allowed, mixed, -np.inf)
        return mixed.masked_fill(~allowed, -np.inf)

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
    return "none" if found is None else repr(found[:_LONGEST])


@contextmanager
def _named() -> Iterator[None]:
    """A context in which the errors of a model name the blend's field."""
    try:
        yield
    except UserError as error:
        error.args = (re.sub(r"\bmodel\.(path|revision|dtype)\b", lambda found: _FIELDS[found[1]], str(error)),)
        raise
