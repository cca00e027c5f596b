"""The typed configuration of a draft's training, its checks and its identity. No model is loaded here.

`python -m dflash_mcmc.train draft=tiny` uses `conf/train_draft_tiny.yaml`. `draft=dflash` uses `conf/train_draft.yaml`, the
published recipe, which works for any target.
"""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from omegaconf import MISSING

from dflash_mcmc.components import identity, identity_values, runtime
from dflash_mcmc.config import command
from dflash_mcmc.config.identity import hash_of
from dflash_mcmc.config.schema import Paths, store_schema
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean
from dflash_mcmc.model.files import Checkpoint
from dflash_mcmc.ops import LARGEST, SMALLEST

RECIPES = {name: f"train_draft_{name}" for name in (
    "tiny", "smollm2", "qwen2_5_coder_0_5b")} | {"dflash": "train_draft"}
"""The values of `draft=` and their root configurations."""
_DEFAULT_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
"""Published values of gamma by block size."""
_IDENTITY_VERSION = 2
"""Increase it if the meaning of a field or the random numbers change."""


@dataclass(slots=True, kw_only=True)
class Shape:
    """Shape of the draft network."""

    num_layers: int = identity(5, "number of layers", ge=1, le=1024)
    block_size: int = identity(16, "positions in a block: the anchor and the drafted tokens", ge=2, le=1024)
    num_features: int = identity(5, "number of target layers whose outputs the draft reads, evenly spaced from the second one",
                                 ge=1)
    intermediate_size: int | None = identity(None, "width of the feed-forward layers; null uses the target's", ge=1)
    mask_token_id: int | None = identity(None, "id of the mask at positions to draft; null uses the first id without a token",
                                         ge=0)


@dataclass(slots=True, kw_only=True)
class Prompts:
    """The prompts for the target."""

    num: int | None = identity(None, "number of training prompts; null uses all lines of the file that are not held out", ge=1)
    held_out: int = identity(64, "number of prompts for evaluation only; in a file they are the last ones", ge=1)
    path: str | None = identity(MISSING, "JSON Lines file of questions; null uses training questions of dataset=arith")
    field: str = identity("question", "field of the file's lines that contains the question")
    template: str = identity("{question}", "template of the prompt; {question} is replaced by the question")


@dataclass(slots=True, kw_only=True)
class Responses:
    """Sampling of the target's responses."""

    temperatures: list[float] = identity([1.0], "temperatures of the training responses, used in turn; 0 is greedy")
    held_out: list[float] = identity([0.0, 1.0], "temperatures of the held-out responses; the accepted length is reported for "
                                     "each")
    max_new_tokens: int = identity(2048, "maximal length of a response in tokens", ge=2)


@dataclass(slots=True, kw_only=True)
class DraftPlan:
    """A training run of a draft: `conf/train_draft.yaml`."""

    shape: Shape = field(default_factory=Shape)
    prompts: Prompts = field(default_factory=Prompts)
    responses: Responses = field(default_factory=Responses)
    target: Literal["tokens", "p", "p_alpha"] = identity(
        "tokens", "what the draft learns: tokens = the responses' tokens (cross-entropy); p = the target's distribution of "
        "each token (KL divergence); p_alpha = p to the power alpha, normalised (KL divergence)")
    alpha: float = identity(4.0, "exponent for target=p_alpha", gt=0)
    loss_ids: int | None = identity(None, "number of ids over which the loss normalises besides those of the step: half are "
                                    "the most frequent ones, half are random and stand for the rest; null = all ids", ge=2)
    init: str | None = identity(None, "folder of a draft with the same shape, whose weights the training starts from; null "
                                "starts from random weights")
    anchors: int = identity(512, "blocks per sequence in a step, chosen at random in every epoch", ge=1, le=1_000_000)
    prompt_end: bool = identity(False, "whether the prompt's last token, where engines start drafting, may be an anchor too")
    loss_gamma: float | None = identity(None, "gamma in the weight exp(-(k - 1) / gamma) of slot k; null uses 7 for blocks of "
                                        "16, 5 for 10 and 4 for 8", gt=0)
    steps: int = identity(150000, "number of optimiser steps; 0 evaluates the draft of init on the held-out prompts and "
                          "trains nothing", ge=0)
    batch_size: int = identity(32, "sequences per step, over all processes", ge=1, le=1_000_000)
    learning_rate: float = identity(6.0e-4, "peak learning rate, which then decays to zero along a cosine", gt=0)
    warmup_fraction: float = identity(0.04, "fraction of the steps in which the learning rate rises", ge=0, lt=1)
    weight_decay: float = identity(0.0, "weight decay of AdamW", ge=0)
    precision: Literal["float32", "bfloat16"] = identity(
        "bfloat16", "number format of the forward pass; the weights are kept in float32")
    seed: int = identity(0, "seed of the initial weights, prompts, responses, order and anchors")
    keep_features: bool = runtime(False, "read all training responses once, before the first step, and keep the target's "
                                  "features in memory; false reads the target again in every step")
    rows_at_once: int | None = runtime(4, "sequences in one forward, to limit memory; null uses all", ge=1, le=65_536)
    evaluate_every: int = runtime(1000, "steps between evaluations and checkpoints", ge=1)
    num_threads: int | None = runtime(None, "number of CPU threads; null uses the hardware setting", ge=1, le=4096)
    export: str | None = runtime(None, "folder for the checkpoint of the finished draft; null uses the run folder")
    model: Any = MISSING
    hardware: Any = MISSING
    tracker: Any = MISSING
    paths: Paths = field(default_factory=Paths)

    engine: ClassVar = SimpleNamespace(is_remote=False)
    """What a model's `canonical` asks for: the target answers on this machine."""

    @property
    def gamma(self) -> float:
        """Number of slots after which the weight of a slot falls by a factor e."""
        return self.loss_gamma if self.loss_gamma is not None else _DEFAULT_GAMMA[self.shape.block_size]

    def start(self) -> Checkpoint | None:
        """The checkpoint that the training starts from; None for random weights."""
        return Checkpoint("init", self.init, None, "z-lab/Qwen3-4B-DFlash-b16") if self.init else None

    def check(self) -> None:
        """Checks the plan without loading a model. Raises ConfigError or UserError."""
        self.model.check(self)
        self.hardware.check(self)
        check_shape(self.shape, self.model.num_layers())
        if not self.steps and self.init is None:
            raise ConfigError("steps", 0, "a number >= 1, or 0 with init=FOLDER, to evaluate a draft")
        if start := self.start():
            start.check()
        if self.loss_gamma is None and self.shape.block_size not in _DEFAULT_GAMMA:
            raise ConfigError("loss_gamma", None, "a number > 0; published values exist only for blocks of 16, 10 and 8")
        for name in ("temperatures", "held_out"):
            values = getattr(self.responses, name)
            if not values or not all(value == 0 or SMALLEST <= value <= LARGEST for value in values):
                raise ConfigError(f"responses.{name}", values, f"a list, each 0 or a number from {SMALLEST:g} to {LARGEST:g}")
        if "{question}" not in self.prompts.template:
            raise ConfigError("prompts.template", self.prompts.template, "a text with {question} in it")
        if self.prompts.path is not None and not Path(self.prompts.path).expanduser().is_file():
            raise ConfigError("prompts.path", self.prompts.path, "a JSON Lines or CSV file that exists, or null")
        if self.prompts.path is None and self.prompts.num is None:
            raise ConfigError("prompts.num", None, "a whole number >= 1 if prompts.path is null")
        if self.export is not None and any(path.is_file() for path in (Path(self.export), *Path(self.export).parents)):
            raise ConfigError("export", self.export, "a folder, not a file or below one")


def check_shape(shape: Shape, num_target_layers: int | None) -> None:
    """Checks the shape. `num_target_layers` is None if there is no checkpoint yet; layers are then checked after loading."""
    if num_target_layers is None:
        return
    # The last layer is excluded. Published drafts read its output after the final norm, but engines read it before the norm.
    # Evenly spaced layers from the second one on would repeat if there were more.
    most = max(num_target_layers - 3, min(num_target_layers - 2, 1))
    if shape.num_features > most:
        raise ConfigError("shape.num_features", shape.num_features, f"at most {most} for a target of "
                          f"{num_target_layers} layers")


def compose(name: str, overrides: list[str]) -> DraftPlan:
    """The checked plan for `draft=name` and further overrides. Raises UserError with a message of one line."""
    if name not in RECIPES:
        raise UserError(f"draft: given {name!r}{did_you_mean(name, RECIPES)}; allowed: {', '.join(map(repr, RECIPES))}")
    store_schema("train_draft", DraftPlan)
    plan, _ = command.compose_once(RECIPES[name], overrides, DraftPlan)
    plan.check()
    return plan


def identity_of(plan: DraftPlan) -> dict[str, object]:
    """Everything that determines the weights: the identity fields, and the contents of the target and the prompt file."""
    identity: dict[str, object] = {"version": _IDENTITY_VERSION}
    identity.update(identity_values(plan))
    identity.update({f"model.{name}": value for name, value in plan.model.canonical(plan).items()})
    identity.update({"loss_gamma": plan.gamma, "alpha": plan.alpha if plan.target == "p_alpha" else None})
    identity["model.content"] = plan.model.fingerprint()
    if start := plan.start():
        identity[start.field] = start.fingerprint()
    if plan.prompts.path is not None:
        content = Path(plan.prompts.path).expanduser().read_bytes()
        identity["prompts.path"] = hashlib.sha256(content).hexdigest()
    return identity


_OF_RESPONSES = re.compile(r"version|seed|model\..+|prompts\..+|responses\..+")


def responses_folder(plan: DraftPlan) -> Path:
    """`outputs/train/responses-<identity>`. Plans that differ only in how they train share their responses."""
    identity = {name: value for name, value in identity_of(plan).items() if _OF_RESPONSES.fullmatch(name)}
    return Path(plan.paths.outputs) / "train" / f"responses-{hash_of(identity)}"


def run_folder(plan: DraftPlan) -> Path:
    """`outputs/train/draft-<identity>`."""
    return Path(plan.paths.outputs) / "train" / f"draft-{hash_of(identity_of(plan))}"
