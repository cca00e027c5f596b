"""The blocks of each training step. Every epoch has its own random order of the sequences and its own random anchors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.rng import Key
from dflash_mcmc.train.batches import POOL_BATCHES, cut_by_length
from dflash_mcmc.train.responses import Response


class TrainingBlocks(NamedTuple):
    """Blocks of some sequences.

    Attributes:
        tokens: int64 (rows, length), padded on the right.
        lengths: int64 (rows,).
        anchors: int64 (rows, blocks), positions of the anchors; padded with -1.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    anchors: torch.Tensor

    def rows(self, rows: list[int]) -> TrainingBlocks:
        """A selection of the sequences, with the padding reduced to the longest of them."""
        length = int(self.lengths[rows].max())
        return TrainingBlocks(self.tokens[rows, :length], self.lengths[rows], self.anchors[rows])

    def to(self, device: torch.device) -> TrainingBlocks:
        """The same blocks on another device."""
        return TrainingBlocks(*(part.to(device) for part in self))


def first_anchor(response: Response, prompt_end: bool) -> int:
    """Position of the first possible anchor: the first token of the answer, or with `prompt_end` the prompt's last token."""
    return response.prompt_length - prompt_end


def possible_anchors(response: Response, prompt_end: bool) -> range:
    """All possible anchors: the positions from `first_anchor` to the last token but one."""
    return range(first_anchor(response, prompt_end), response.length - 1)


def draw_anchors(response: Response, count: int, prompt_end: bool, key: Key) -> np.ndarray:
    """`count` different anchors, uniformly random and sorted by position; all possible anchors if there are fewer."""
    possible = possible_anchors(response, prompt_end)
    chosen = key.uniforms(0, len(possible)).argsort(kind="stable")[:count]
    return possible.start + np.sort(chosen)


def gather(responses: Sequence[Response], anchors: Sequence[np.ndarray]) -> TrainingBlocks:
    """The sequences and their anchors as tensors, padded to the longest."""
    lengths = [response.length for response in responses]
    tokens = np.zeros((len(responses), max(lengths)), np.int64)
    padded = np.full((len(responses), max(map(len, anchors))), -1)
    for row, (response, chosen) in enumerate(zip(responses, anchors, strict=True)):
        tokens[row, : response.length] = response.tokens
        padded[row, : len(chosen)] = chosen
    return TrainingBlocks(torch.from_numpy(tokens), torch.tensor(lengths), torch.from_numpy(padded))


class Epochs:
    """The training batches. Batch n depends only on the seed and n, so a resumed run gets the same batches.

    Args:
        responses: the training responses. A response without a possible anchor is ignored.
        batch_size: sequences per batch.
        anchors: maximal number of blocks per sequence.
        prompt_end: whether the last token of the prompt is a possible anchor.
    """

    def __init__(self, responses: Sequence[Response], batch_size: int, anchors: int, prompt_end: bool, seed: int):
        self._responses = [response for response in responses if possible_anchors(response, prompt_end)]
        self._batch_size, self._anchors, self._prompt_end = batch_size, anchors, prompt_end
        self._key = Key(seed).fold_in("draft", "blocks")
        self.num_batches = len(self._responses) // batch_size
        self._at: tuple[int, int] | None = None
        self._pool: list[list[int]] = []

    def indices(self, step: int) -> list[int]:
        """The numbers of a step's responses among those with a possible anchor."""
        epoch, batch = divmod(step, self.num_batches)
        pool, offset = divmod(batch, POOL_BATCHES)
        if self._at != (epoch, pool):
            self._at, self._pool = (epoch, pool), self._make_pool(epoch, pool)
        return self._pool[offset]

    def __call__(self, step: int) -> TrainingBlocks:
        epoch, indices = step // self.num_batches, self.indices(step)
        responses = [self._responses[index] for index in indices]
        keys = [self._key.fold_in("anchors", epoch, index) for index in indices]
        return gather(responses, [draw_anchors(response, self._anchors, self._prompt_end, key)
                                  for response, key in zip(responses, keys, strict=True)])

    def _make_pool(self, epoch: int, pool: int) -> list[list[int]]:
        size = self._batch_size * POOL_BATCHES
        order = self._key.fold_in("order", epoch).uniforms(0, len(self._responses)).argsort(kind="stable")
        indices = order[pool * size : (pool + 1) * size].tolist()
        lengths = [self._responses[index].length for index in indices]
        return cut_by_length(indices, lengths, self._batch_size, self._key.fold_in("pool", epoch, pool))
