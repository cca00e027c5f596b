"""The draft along given answers, in one pass of its network, as it is or with one thing changed.

This forward is independent of the engine: it has no cache, and reads whole sequences. With nothing changed, its blocks must
therefore gain what the engine's blocks gained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dflash_mcmc.draft.check.walks import BlockWalk
from dflash_mcmc.forcing import sequences

if TYPE_CHECKING:
    from dflash_mcmc.draft.network.dflash import DFlash
    from dflash_mcmc.engine.batching.language_model import LanguageModel

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
    norm: str = "last"
    """The features to which the target's final norm is applied: that of the last layer (last), all, or none."""
    dropped: int | None = None
    """Number of a feature that is replaced by zeros."""


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
    return changed.eval().requires_grad_(False)


def kept_anchors(walks: Sequence[BlockWalk], most: int) -> list[np.ndarray]:
    """Numbers of the blocks of each walk that are drafted again, int64, at most about `most` of all, evenly spaced."""
    total = sum(len(walk.gained) for walk in walks)
    every = max(1, -(-total // most))
    return [np.arange(number % every, len(walk.gained), every) for number, walk in enumerate(walks)]


@torch.no_grad()
def forced(model: LanguageModel, walks: Sequence[BlockWalk], kept: Sequence[np.ndarray], settings: Sequence[DraftSetting],
           logits: Callable[[LanguageModel, torch.Tensor], torch.Tensor], step: Callable[[], object]) -> list[ForcedBlocks]:
    """The kept blocks of the walks in each setting. The target reads each walk once.

    Args:
        logits: logits(head's model, hidden) -> float32 (..., vocabulary), with the draft's scales.
        step: is called after each forward of the draft.
    """
    found: list[list[ForcedBlocks]] = [[] for _ in settings]
    layers = tuple(sorted({layer for setting in settings for layer in setting.layers}))
    for start in range(0, len(walks), _ROWS_AT_ONCE):
        part = _WalkBatch(walks[start : start + _ROWS_AT_ONCE], kept[start : start + _ROWS_AT_ONCE], start, model)
        reading = sequences.read(model, part.tokens, layers)
        outputs = dict(zip(layers, reading.outputs, strict=True))
        for setting, pieces in zip(settings, found, strict=True):
            pieces.append(part.measured(setting, _features(setting, model, reading.hidden, outputs), logits))
            step()
    return [_joined(pieces) for pieces in found]


def _features(setting: DraftSetting, model: LanguageModel, hidden: torch.Tensor,
              outputs: dict[int, torch.Tensor]) -> torch.Tensor:
    """(rows, length, features · hidden)."""
    last, parts = len(model.layers) - 1, []
    for number, layer in enumerate(setting.layers):
        feature = outputs[layer]
        if setting.norm == "all" or (setting.norm == "last" and layer == last):
            feature = hidden if layer == last else model.final_norm(feature)
        parts.append(torch.zeros_like(feature) if number == setting.dropped else feature)
    return torch.cat(parts, dim=-1)


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
        found, broken = [torch.empty((0, places.shape[1]), dtype=torch.int64, device=hidden.device)], 0
        for part, before in zip(hidden.split(at_once), previous.split(at_once), strict=True):
            scores = setting.network.along(logits(setting.head, part), part, before)
            best = scores.max(dim=-1)
            numbers = best.values.isfinite()  # NaN is the maximum of a row that has one
            broken += int((~numbers).any(dim=-1).sum())
            found.append(best.indices.where(numbers, -1))
        return torch.cat(found), broken

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


