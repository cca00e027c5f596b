"""Answers that the engine draws speculatively, and their blocks drafted again, as they are or with one thing changed.

The second forward is independent of the engine: it has no cache, and reads whole sequences. With nothing changed, its blocks
must therefore gain what the engine's blocks gained. `alternatives` are the known mistakes, each as the setting that puts it
right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from dflash_mcmc.draft.network.config import default_target_layers
from dflash_mcmc.engine import slots
from dflash_mcmc.engine.batching.row_linear import RowLinear
from dflash_mcmc.errors import UserError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.model.files import precision_name
from dflash_mcmc.ops import Chain, Draw, SamplingParams
from dflash_mcmc.process import bars
from dflash_mcmc.rng import Key
from dflash_mcmc.runner import build
from dflash_mcmc.types import ChainResult, Trajectory

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.draft.network.dflash import DFlash
    from dflash_mcmc.engine.batching.batched import BatchedEngine
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import Drafter
    from dflash_mcmc.model.hf import HFModel


SYSTEM = "You are a helpful assistant."
"""The system turn of the template states that have one."""


class BlockWalk(NamedTuple):
    """An answer, drawn block by block with sample and match."""

    problem: str
    prompt: np.ndarray
    """int64 (prompt length,)."""
    tokens: np.ndarray
    """int64 (answer length,)."""
    gained: tuple[int, ...]
    """Tokens that each forward of the target gave, in the order of the answer."""

    @property
    def sequence(self) -> np.ndarray:
        """Prompt and answer."""
        return np.concatenate([self.prompt, self.tokens])

    def anchors(self) -> np.ndarray:
        """Position in the sequence of each block's anchor, int64 (blocks,). The first one is the prompt's last token."""
        return len(self.prompt) - 1 + np.concatenate([[0], np.cumsum(self.gained)[:-1]]).astype(np.int64)


class TemplateState(NamedTuple):
    """A way to present the problems to the model."""

    name: str
    config: Config


def template_states(config: Config) -> list[TemplateState]:
    """The other ways to present the problems, each with one thing changed: chat template, thinking, system turn."""
    model, dataset = cast("HFModel", config.model), config.dataset
    states = [TemplateState(f"model.chat={str(not model.chat).lower()}", dataclasses.replace(
        config, model=dataclasses.replace(model, chat=not model.chat)))]
    if model.chat:
        thinking = not model.enable_thinking
        states.append(TemplateState(f"model.enable_thinking={str(thinking).lower()}", dataclasses.replace(
            config, model=dataclasses.replace(model, enable_thinking=thinking))))
    system = None if dataset.system is not None else SYSTEM
    states.append(TemplateState("no system turn" if system is None else "a system turn", dataclasses.replace(
        config, dataset=dataclasses.replace(dataset, system=system))))
    return states


def prompts_of(config: Config, model: LanguageModel) -> dict[str, np.ndarray]:
    """The token ids of each problem's prompt, by problem id. Raises UserError."""
    return build.prompts(config, model, config.dataset.problems())


def draw(config: Config, model: LanguageModel, drafter: Drafter, prompts: dict[str, np.ndarray], temperature: float,
         name: str) -> list[BlockWalk]:
    """An answer to each prompt. Raises UserError if an answer cannot be drawn.

    Args:
        temperature: the target's. The draft proposes its most likely tokens.
        name: the title of the progress bar.
    """
    engine, walks = engine_of(config, model, drafter, prompts), dict[str, BlockWalk]()
    with bars.Bar(len(prompts), "answer", name) as bar:
        for walk in answers(engine, config, prompts, temperature):
            walks[walk.problem] = walk
            bar.update()
    return [walks[problem] for problem in prompts if len(walks[problem].tokens) > 1]


def engine_of(config: Config, model: LanguageModel, drafter: Drafter | None, prompts: dict[str, np.ndarray],
              trace: bool = True) -> BatchedEngine:
    """An engine with the configuration's decoder and a trace, or without a drafter a plain one. Raises UserError."""
    speculation = None if drafter is None else config.decoder.speculation(drafter)
    return slots.engine_of(config, model.stopping_at(config.dataset.stop), max(map(len, prompts.values())), len(prompts), None,
                           speculation and speculation._replace(trace=trace), drafter)


def answers(engine: BatchedEngine, config: Config, prompts: dict[str, np.ndarray], temperature: float) -> Iterator[BlockWalk]:
    """The answers as they end; steps without a trace gain one token. Raises UserError if one cannot be drawn."""
    sampling = SamplingParams(temperature=temperature)

    def chain(problem: str) -> Chain:
        key = Key(config.seed).fold_in("drafts", problem)
        return ChainResult((yield Draw(Trajectory.start(prompts[problem]), config.dataset.max_new_tokens, sampling, key)))

    for done in engine.run((problem, chain(problem)) for problem in prompts):
        if done.result is None:
            raise UserError(f"draft: the answer to problem {done.tag} cannot be drawn: {done.failure}")
        tokens = done.result.trajectory.tokens.astype(np.int64)
        gained = tuple(cast("int", block["gained"]) for block in done.walk) or (1,) * len(tokens)
        yield BlockWalk(done.tag, prompts[done.tag], tokens, gained)


def same_prompts(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether all prompts have the same tokens."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def by_position(walks: Sequence[BlockWalk], edges: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, forwards) of each walk, in each range of positions of the answer. A block counts where it begins."""
    by_range = []
    for first, below in zip((0, *edges), (*edges, np.inf), strict=True):
        inside = [[gained for gained, start in zip(walk.gained, walk.anchors() + 1 - len(walk.prompt), strict=True)
                   if first <= start < below] for walk in walks]
        by_range.append((np.array([sum(each) for each in inside]), np.array([len(each) for each in inside])))
    return by_range


SHIFTS = (-2, -1, 0, 1, 2)
"""Distances, in places, from a slot to the tokens that its proposal is compared with."""
_ROWS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSetting:
    """How the draft is run."""

    network: DFlash
    layers: tuple[int, ...]
    """The target's layers whose outputs are the features, in their order; -1 is the embedding."""
    offset: int
    """Row r of a block predicts the token r + offset places after the anchor."""
    embedding: LanguageModel
    """The model whose embedding table the draft uses."""
    head: LanguageModel
    """The model whose head the draft uses."""
    all_normed: bool = False
    """Whether the target's final norm is applied to all features, not to that of the last layer alone."""


class ForcedBlocks(NamedTuple):
    """What the blocks of some walks gained, and what their slots proposed."""

    problem: np.ndarray
    """int64 (blocks,), number of the walk."""
    gained: np.ndarray
    """int64 (blocks,), accepted tokens and the target's token after them, at most what is left of the answer."""
    right: np.ndarray
    """bool (shifts, blocks, slots): whether a slot's proposal is the answer's token that many places after the slot."""
    inside: np.ndarray
    """bool (shifts, blocks, slots): whether there is such a token in the answer."""
    not_numbers: int
    """Blocks whose logits are not numbers. Their proposals count as wrong."""


def with_shape(network: DFlash, **changes: object) -> DFlash:
    """The network with the same tensors and other fields of its shape."""
    with torch.device("meta"):
        changed = type(network)(dataclasses.replace(network.shape, **changes))  # type: ignore[arg-type]
    changed.load_state_dict(network.state_dict(), assign=True)
    for name, module in network.named_modules():
        if isinstance(module, RowLinear):  # no other layer reads packed weights
            parent, _, own = name.rpartition(".")
            setattr(changed.get_submodule(parent), own, module)
    return changed.eval().requires_grad_(False)


def kept_anchors(walks: Sequence[BlockWalk], most: int) -> list[np.ndarray]:
    """Numbers of the blocks of each walk that are drafted again, int64, at most about `most` of all, evenly spaced."""
    total = sum(len(walk.gained) for walk in walks)
    every = max(1, -(-total // most))
    return [np.arange(index % every, len(walk.gained), every) for index, walk in enumerate(walks)]


@torch.no_grad()
def forced(model: LanguageModel, walks: Sequence[BlockWalk], kept: Sequence[np.ndarray], settings: Sequence[DraftSetting],
           logits: Callable[[LanguageModel, torch.Tensor], torch.Tensor], step: Callable[[], object]) -> list[ForcedBlocks]:
    """The kept blocks of the walks in each setting. The target reads each walk once.

    Args:
        logits: logits(head's model, hidden) -> float32 (..., vocabulary), with the draft's scales.
        step: is called after each forward of the draft.
    """
    of_settings: list[list[ForcedBlocks]] = [[] for _ in settings]
    layers = tuple(sorted({layer for setting in settings for layer in setting.layers}))
    for start in range(0, len(walks), _ROWS_AT_ONCE):
        batch = _WalkBatch(walks[start : start + _ROWS_AT_ONCE], kept[start : start + _ROWS_AT_ONCE], start, model)
        reading = sequences.read(model, batch.tokens, layers)
        outputs = dict(zip(layers, reading.outputs, strict=True))
        for setting, pieces in zip(settings, of_settings, strict=True):
            pieces.append(batch.measured(setting, _features(setting, model, reading.hidden, outputs), logits))
            step()
    return [_joined(pieces) for pieces in of_settings]


def _features(setting: DraftSetting, model: LanguageModel, hidden: torch.Tensor,
              outputs: dict[int, torch.Tensor]) -> torch.Tensor:
    """(rows, length, features · hidden)."""
    last, features = len(model.layers) - 1, []
    for layer in setting.layers:
        feature = outputs[layer]
        features.append(hidden if layer == last else model.final_norm(feature) if setting.all_normed else feature)
    return torch.cat(features, dim=-1)


class _WalkBatch:
    """Some walks as tensors.

    Args:
        first: number of the first walk.
    """

    def __init__(self, walks: Sequence[BlockWalk], kept: Sequence[np.ndarray], first: int, model: LanguageModel):
        texts = [walk.sequence for walk in walks]
        anchors = [walk.anchors()[chosen] for walk, chosen in zip(walks, kept, strict=True)]
        tokens = np.zeros((len(texts), max(map(len, texts))), np.int64)
        padded = np.full((len(texts), max(1, *map(len, anchors))), -1, np.int64)
        for row, (text, chosen) in enumerate(zip(texts, anchors, strict=True)):
            tokens[row, : len(text)] = text
            padded[row, : len(chosen)] = chosen
        self.used = padded >= 0
        self.problem = (first + np.nonzero(self.used)[0]).astype(np.int64)
        self.tokens, self.anchors, self.lengths = (torch.from_numpy(x).to(model.device) for x in (
            tokens, padded, np.array([len(text) for text in texts])))

    def measured(self, setting: DraftSetting, features: torch.Tensor,
                 logits: Callable[[LanguageModel, torch.Tensor], torch.Tensor]) -> ForcedBlocks:
        """The blocks of these walks in a setting."""
        first = max(0, 1 - setting.offset)
        hidden = sequences.drafted(setting.network, setting.embedding, features, self.tokens, self.lengths, self.anchors,
                                   first_row=first)
        used = torch.from_numpy(self.used).to(hidden.device)
        places = self.anchors[..., None] + first + setting.offset + torch.arange(hidden.shape[2], device=hidden.device)
        rows = torch.arange(len(self.tokens), device=hidden.device)[:, None].expand_as(self.anchors)[used]
        hidden, places = hidden[used], places[used]
        proposed, broken = self._proposed(setting, hidden, rows, places, logits)
        compared = [self._compared(rows, places + shift, proposed) for shift in SHIFTS]
        right, inside = (np.stack([each[n] for each in compared]) for n in (0, 1))
        now = SHIFTS.index(0)
        leading = right[now].astype(np.int64).cumprod(axis=1).sum(axis=1) + 1
        left = (self.lengths[rows] - 1 - self.anchors[used]).cpu().numpy()
        return ForcedBlocks(self.problem, np.minimum(leading, left), right, inside, broken)

    def _proposed(self, setting: DraftSetting, hidden: torch.Tensor, rows: torch.Tensor, places: torch.Tensor,
                  logits: Callable[[LanguageModel, torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, int]:
        """The most likely token of each slot, int64 (blocks, slots), -1 where logits are not numbers, and such blocks."""
        previous = self.tokens[rows[:, None], (places - 1).clamp(max=self.tokens.shape[1] - 1)]
        at_once = max(1, sequences.positions_at_once(setting.head.vocab_size) // places.shape[1])
        likeliest, broken = [torch.empty((0, places.shape[1]), dtype=torch.int64, device=hidden.device)], 0
        for states, before in zip(hidden.split(at_once), previous.split(at_once), strict=True):
            scores = setting.network.along(logits(setting.head, states), states, before)
            best = scores.max(dim=-1)
            numbers = best.values.isfinite()  # NaN is the maximum of a row that has one
            broken += int((~numbers).any(dim=-1).sum())
            likeliest.append(best.indices.where(numbers, -1))
        return torch.cat(likeliest), broken

    def _compared(self, rows: torch.Tensor, places: torch.Tensor,
                  proposed: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Whether the proposals are the tokens at these places, and whether the places are in the answer."""
        inside = (places < self.lengths[rows][:, None]) & (places > 0)
        tokens = self.tokens[rows[:, None], places.clamp(0, self.tokens.shape[1] - 1)]
        return ((proposed == tokens) & inside).cpu().numpy(), inside.cpu().numpy()


def _joined(pieces: Sequence[ForcedBlocks]) -> ForcedBlocks:
    problem, gained = (np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("problem", "gained"))
    right, inside = (np.concatenate([getattr(piece, name) for piece in pieces], axis=1) for name in ("right", "inside"))
    return ForcedBlocks(problem, gained, right, inside, sum(piece.not_numbers for piece in pieces))


def chunks(walks: Sequence[BlockWalk]) -> int:
    """Number of forwards of the draft that a setting takes."""
    return -(-len(walks) // _ROWS_AT_ONCE)


_THETAS = (1e4, 1e6)
"""Bases of the rotation that most published models have."""


class Alternative(NamedTuple):
    """A changed setting."""

    kind: str
    """layout, layers, norm, mask, rope, block, dtype or weights."""
    name: str
    """What is changed, for tables."""
    cause: str
    """The mistake, if the draft accepts more in this setting: a clause for the sentence of the verdict."""
    setting: DraftSetting
    step: int = 0
    """For a layout, the places from a slot to the token that it predicts."""


class CheckedPair(NamedTuple):
    """What the alternatives are made of."""

    base: DraftSetting
    target: LanguageModel
    float32: DFlash | None
    """The checkpoint loaded in float32, if the draft runs in another precision."""
    other: LanguageModel | None
    """Another model that the draft may have been trained for."""


def alternatives(subject: CheckedPair, kinds: Sequence[str] | None = None) -> list[Alternative]:
    """All alternatives that apply, or those of some kinds. Settings that are the draft's own are left out."""
    makers = {"layout": _layout, "layers": _layers, "norm": _norms, "mask": _masks, "rope": _rotations, "block": _blocks,
              "dtype": _precision, "weights": _weights}
    return [alternative for kind in (makers if kinds is None else kinds) for alternative in makers[kind](subject)]


def _layout(subject: CheckedPair) -> Iterator[Alternative]:
    base = subject.base
    for step, side in ((1, "after"), (-1, "before")):
        yield Alternative("layout", f"rows {'one later' if step > 0 else 'one earlier'}",
                          f"the block is off by one slot: each row predicts the token {side} its own slot",
                          dataclasses.replace(base, offset=base.offset + step), step)


def _layers(subject: CheckedPair) -> Iterator[Alternative]:
    base, last = subject.base, len(subject.target.layers) - 1
    layers, seen = base.layers, {base.layers}
    lists = [("every layer + 1", tuple(layer + 1 for layer in layers), "the layers of the features are one too low"),
             ("every layer - 1", tuple(layer - 1 for layer in layers), "the layers of the features are one too high"),
             ("layers reversed", layers[::-1], "the features are in the reversed order")]
    for one, two in combinations(range(len(layers)), 2):
        swapped = list(layers)
        swapped[one], swapped[two] = layers[two], layers[one]
        lists.append((f"features {one + 1} and {two + 1} exchanged", tuple(swapped),
                      f"features {one + 1} and {two + 1} are exchanged"))
    lists.append(("the published rule", default_target_layers(last + 1, len(layers)),
                  "the features are not those of the published rule for this number of layers"))
    for name, changed, cause in lists:
        if changed not in seen and all(0 <= layer <= last for layer in changed):
            seen.add(changed)
            yield Alternative("layers", f"{name}: {list(changed)}", f"{cause} ({list(layers)}, better {list(changed)})",
                              dataclasses.replace(base, layers=changed))


def _norms(subject: CheckedPair) -> Iterator[Alternative]:
    yield Alternative("norm", "features after the final norm",
                      "the draft was trained with features after the target's final norm, and gets them before it",
                      dataclasses.replace(subject.base, all_normed=True))


def _masks(subject: CheckedPair) -> Iterator[Alternative]:
    shape, target, tokenizer = subject.base.network.shape, subject.target, subject.target.tokenizer
    unused = target.forbidden.nonzero().flatten().tolist()
    candidates = {"the first unused id": unused[0] if unused else None,
                  "mask token of the tokenizer": getattr(tokenizer, "mask_token_id", None),
                  "pad token of the tokenizer": getattr(tokenizer, "pad_token_id", None)}
    seen = {shape.mask_token_id}
    for name, token in candidates.items():
        if isinstance(token, int) and token not in seen and token < target.vocab_size:
            seen.add(token)
            yield Alternative("mask", f"mask {token}, {name}", f"mask_token_id is {shape.mask_token_id}, and {token} ({name}) "
                              "fits", _with_shape(subject, mask_token_id=token))


def _rotations(subject: CheckedPair) -> Iterator[Alternative]:
    rope = subject.base.network.shape.rope
    own = getattr(subject.target.config, "rope_parameters", None) or {}
    theirs = own.get("rope_theta") if isinstance(own, dict) else None
    for theta in dict.fromkeys((*([theirs] if theirs else []), *_THETAS)):
        if theta != rope["rope_theta"]:
            whose = " (the target's)" if theta == theirs else ""
            yield Alternative("rope", f"rope_theta {theta:g}{whose}",
                              f"rope_theta is {rope['rope_theta']:g}, and {theta:g} fits{whose}",
                              _with_shape(subject, rope={**rope, "rope_theta": theta}))


def _blocks(subject: CheckedPair) -> Iterator[Alternative]:
    own = subject.base.network.shape.block_size
    for size in (own // 2, own * 2):
        if size > 2:
            word = "larger" if own > size else "smaller"
            yield Alternative("block", f"block size {size}", f"the block size {own} is {word} than the trained one; {size} "
                              "fits better", _with_shape(subject, block_size=size))


def _precision(subject: CheckedPair) -> Iterator[Alternative]:
    if subject.float32 is not None:
        dtype = precision_name(subject.base.network.fc.weight.dtype)
        yield Alternative("dtype", "the draft in float32", f"the draft runs in {dtype}, which is too coarse or overflows",
                          dataclasses.replace(subject.base, network=subject.float32))


def _weights(subject: CheckedPair) -> Iterator[Alternative]:
    base, other = subject.base, subject.other
    if other is None:
        return
    for what, setting in (("embedding", dataclasses.replace(base, embedding=other)),
                          ("head", dataclasses.replace(base, head=other)),
                          ("embedding and head", dataclasses.replace(base, embedding=other, head=other))):
        yield Alternative("weights", f"{what} of the other model", f"the draft was trained with the {what} of the other "
                          "model, not with this target's", setting)


def _with_shape(subject: CheckedPair, **changes: object) -> DraftSetting:
    return dataclasses.replace(subject.base, network=with_shape(subject.base.network, **changes))
