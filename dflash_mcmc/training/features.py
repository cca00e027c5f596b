"""The target's features of the training responses, kept in memory so that each response is read once and not in every epoch.

Each response is read alone. Its features then do not depend on the batch in which it occurs first, and a run that was resumed
has the same ones to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_mcmc.forcing import sequences
from dflash_mcmc.inference.language_model import LanguageModel
from dflash_mcmc.training.blocks import TrainingBlocks


class KeptFeatures:
    """Features by the number of the response. A response takes length · layers · hidden numbers of the model's dtype.

    Args:
        layers: the target's layers that the draft reads.
    """

    def __init__(self, model: LanguageModel, layers: tuple[int, ...]):
        self._model, self._layers = model, layers
        self._kept: dict[int, torch.Tensor] = {}

    def __call__(self, numbers: Sequence[int], blocks: TrainingBlocks) -> torch.Tensor:
        """Features (rows, length, layers · hidden) of the responses with these numbers, padded with zeros.

        Args:
            blocks: the responses, in the order of the numbers.
        """
        for row, number in enumerate(numbers):
            if number not in self._kept:
                tokens = blocks.tokens[row : row + 1, : blocks.lengths[row]]
                self._kept[number] = sequences.read(self._model, tokens, self._layers).features(self._model, self._layers)[0]
        return torch.nn.utils.rnn.pad_sequence([self._kept[number] for number in numbers], batch_first=True)
