"""The typed configuration of a draft's training, its checks and its identity. Nothing here touches a model.

`python -m dflash_mcmc.train draft=tiny` is `conf/train_draft_tiny.yaml`; `draft=dflash` is `conf/train_draft.yaml`, the
published recipe for any target.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from dflash_mcmc.config import command
from dflash_mcmc.config.identity import hash_of
from dflash_mcmc.config.schema import Paths
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean
from dflash_mcmc.fields import identity, runtime, spec_of, walk

RECIPES = {"tiny": "train_draft_tiny", "dflash": "train_draft"}
"""What `draft=` can name, and its root configuration."""
_DEFAULT_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
_IDENTITY_VERSION = 1
"""Raised when the meaning of a field, or what is drawn, changes."""


@dataclass(slots=True, kw_only=True)
class Shape:
    """The draft network."""

    num_layers: int = identity("layers", ge=1)
    block_size: int = identity("positions of a block: the anchor and the drafted tokens", ge=2)
    num_features: int = identity("layers of the target whose outputs are read, evenly from its second on", ge=1)
    target_layers: list[int] | None = identity(  # noqa: RUF009
        "these layers of the target instead, the first being 0; null takes num_features")
    intermediate_size: int | None = identity("width of the feed-forward part; null takes the target's", ge=1)
    num_heads: int | None = identity("heads of attention; null takes the target's", ge=1)
    num_key_heads: int | None = identity("heads of keys and values; null takes the target's", ge=1)
    head_dim: int | None = identity("of a head, even; null takes the target's", ge=2)
    mask_token_id: int | None = identity("id that stands where a token is drafted; null takes the first one that no token has",
                                         ge=0)


@dataclass(slots=True, kw_only=True)
class Prompts:
    """What the target is asked."""

    num: int | None = identity("training prompts; null takes all of the file that are not held out", ge=1)
    held_out: int = identity("prompts that are evaluated on instead: for a file its last ones", ge=1)
    path: str | None = identity("JSON Lines file of questions; null takes training questions of dataset=arith")
    field: str = identity("of a line of the file: its question")
    template: str = identity("what is asked; {question} stands for the question")


@dataclass(slots=True, kw_only=True)
class Responses:
    """How the target answers."""

    temperatures: list[float] = identity("of the training responses, the prompts taking them in turn; 0 is greedy")  # noqa: RUF009
    held_out: list[float] = identity("of the held-out responses: the accepted length is told for each")  # noqa: RUF009
    max_new_tokens: int = identity("longest response in tokens", ge=2)


@dataclass(slots=True, kw_only=True)
class DraftPlan:
    """A training run of a draft: `conf/train_draft.yaml`."""

    shape: Shape = dataclasses.field(default_factory=Shape)
    prompts: Prompts = dataclasses.field(default_factory=Prompts)
    responses: Responses = dataclasses.field(default_factory=Responses)
    target: str = identity("what the draft learns: tokens = the responses' tokens (cross-entropy); p = the target's law of "
                           "each token; p_alpha = that law to the power alpha, normalised (both by KL divergence)",
                           choices=("tokens", "p", "p_alpha"))
    alpha: float = identity("the power of target=p_alpha", gt=0)
    anchors: int = identity("blocks of a sequence in a step, drawn anew every epoch", ge=1)
    prompt_end: bool = identity("the prompt's last token may be an anchor too: with it this package's engine begins")
    loss_gamma: float | None = identity("slot k weighs exp(-(k - 1) / gamma); null takes 7 for blocks of 16, 5 of 10, 4 of 8",
                                        gt=0)
    steps: int = identity("optimiser steps", ge=1)
    batch_size: int = identity("sequences in a step, of all processes together", ge=1)
    learning_rate: float = identity("the highest; it falls to zero along a cosine", gt=0)
    warmup_fraction: float = identity("first part of the run, in which the rate rises", ge=0, lt=1)
    weight_decay: float = identity("of AdamW", ge=0)
    max_norm: float = identity("longer gradients are scaled to this length", gt=0)
    precision: str = identity("of the forward pass; the weights are kept in float32", choices=("float32", "bfloat16"))
    seed: int = identity("of initial weights, prompts, responses, order and anchors")
    rows_at_once: int | None = runtime("sequences in one forward, to save memory; null takes all", ge=1)
    evaluate_every: int = runtime("steps between evaluations and checkpoints", ge=1)
    num_threads: int | None = runtime("threads of the CPU's arithmetic; null takes what hardware does", ge=1)
    export: str | None = runtime("folder to write the finished draft to, as a checkpoint; null takes the run folder")
    model: Any = MISSING
    hardware: Any = MISSING
    tracker: Any = MISSING
    paths: Paths = dataclasses.field(default_factory=Paths)

    @property
    def gamma(self) -> float:
        """Slots, over which a weight falls by e."""
        return self.loss_gamma if self.loss_gamma is not None else _DEFAULT_GAMMA[self.shape.block_size]

    def check(self) -> None:
        """Raises ConfigError, UserError."""
        self.model.check(self)
        self.hardware.check(self)
        _check_shape(self.shape, self.model.num_layers())
        if self.loss_gamma is None and self.shape.block_size not in _DEFAULT_GAMMA:
            raise ConfigError("loss_gamma", None, "a number > 0; only for blocks of 16, 10 and 8 there is a published one")
        for field in ("temperatures", "held_out"):
            values = getattr(self.responses, field)
            if not values or not all(math.isfinite(value) and value >= 0 for value in values):
                raise ConfigError(f"responses.{field}", values, "a list of numbers >= 0")
        if "{question}" not in self.prompts.template:
            raise ConfigError("prompts.template", self.prompts.template, "a text with {question} in it")
        if self.prompts.path is not None and not Path(self.prompts.path).expanduser().is_file():
            raise ConfigError("prompts.path", self.prompts.path, "a JSON Lines file that exists, or null")
        if self.prompts.path is None and self.prompts.num is None:
            raise ConfigError("prompts.num", None, "a whole number >= 1 where prompts.path is null")


def _check_shape(shape: Shape, num_target_layers: int | None) -> None:
    """`num_target_layers` is None where the checkpoint is not here yet; then the layers are checked once it is loaded."""
    if shape.head_dim is not None and shape.head_dim % 2:
        raise ConfigError("shape.head_dim", shape.head_dim, "an even number")
    if num_target_layers is None:
        return
    # The last layer's output is not a feature: published drafts read it behind the final norm, engines before it.
    last = num_target_layers - 2
    if shape.num_features > last + 1:
        raise ConfigError("shape.num_features", shape.num_features, f"at most {last + 1}, for a target of {last + 2} layers")
    layers = shape.target_layers
    if layers is not None and (not layers or len(set(layers)) < len(layers) or not all(0 <= n <= last for n in layers)):
        raise ConfigError("shape.target_layers", layers, f"different layers from 0 to {last}; the last one is not read")


def compose(name: str, overrides: list[str]) -> DraftPlan:
    """The checked plan of `draft=name` and further overrides. Raises UserError, of one line."""
    if name not in RECIPES:
        raise UserError(f"draft: given {name!r}{did_you_mean(name, RECIPES)}; allowed: {', '.join(map(repr, RECIPES))}")
    command.prepare()
    ConfigStore.instance().store(group="schema", name="train_draft", node=DraftPlan, provider="dflash_mcmc")
    plan, _ = command.compose_once(RECIPES[name], overrides, DraftPlan)
    plan.check()
    return plan


def identity_of(plan: DraftPlan) -> dict[str, object]:
    """What decides the weights: every identity field, and the content of the target and of the prompts' file."""
    values: dict[str, object] = {"version": _IDENTITY_VERSION}
    values.update({name: value for name, field, _, value in walk(plan) if spec_of(field).role == "identity"})
    values.update({f"model.{name}": value for name, value in plan.model.canonical(plan).items()})
    values.update({"loss_gamma": plan.gamma, "alpha": plan.alpha if plan.target == "p_alpha" else None})
    values["model.content"] = plan.model.fingerprint()
    if plan.prompts.path is not None:
        content = Path(plan.prompts.path).expanduser().read_bytes()
        values["prompts.path"] = hashlib.sha256(content).hexdigest()
    return values


def run_folder(plan: DraftPlan) -> Path:
    """`outputs/train/draft-<identity>`."""
    return Path(plan.paths.outputs) / "train" / f"draft-{hash_of(identity_of(plan))}"
